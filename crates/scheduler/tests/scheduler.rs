//! What the scheduler promises its callers, against a fake executor: every sentence about order, budgets, departure,
//! deadlines, retirement and draining. Nothing here measures time.

#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use decision::{Branch, Tree};
use scheduler::{DrainTimeout, Failure, Outcome, Permit, Refusal, Scheduler, SchedulerOptions, StartError};
use testkit::fake::{FakeHandle, Fault, fake, outcome};

type Submission = Pin<Box<dyn Future<Output = Result<Outcome, Failure>> + Send>>;

/// A tree of so many tokens; its first token is its name.
fn tree(name: u32, tokens: usize) -> Tree {
    let branch = Branch { tokens: vec![7; tokens - 1], decide: tokens - 2, option_ends: vec![0] };
    Tree { state: [name].into(), branches: vec![branch] }
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

fn start(options: SchedulerOptions) -> (Arc<Scheduler>, FakeHandle) {
    let (executor, handle) = fake();
    (Arc::new(Scheduler::start(executor, options).unwrap()), handle)
}

/// A submission that has been queued, because it was polled once.
fn queued(permit: Permit, tree: Tree, deadline: Instant) -> Submission {
    let mut submission: Submission = Box::pin(permit.submit(tree, deadline));
    let poll = submission.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(poll.is_pending(), "{poll:?}");
    submission
}

fn submit(scheduler: &Scheduler, name: u32, tokens: usize) -> Submission {
    queued(scheduler.admit().unwrap(), tree(name, tokens), later())
}

/// Submits to an executor that is free, so that the answer may be there at the first poll, and waits for it.
fn answered(scheduler: &Scheduler, name: u32) {
    wait(Box::pin(scheduler.admit().unwrap().submit(tree(name, 3), later()))).unwrap();
}

/// Polls to the end on this thread.
fn wait<F: Future + Unpin>(mut future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    loop {
        match Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Spins until something that other threads do becomes true.
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "never happened: {what}");
        std::thread::yield_now();
    }
}

fn names(handle: &FakeHandle) -> Vec<Vec<u32>> {
    handle.batches().iter().map(|batch| batch.iter().map(|tree| tree.state[0]).collect()).collect()
}

#[test]
fn an_answer_is_its_own_trees_and_says_where_the_time_went() {
    let (scheduler, handle) = start(SchedulerOptions::default());
    handle.hold();
    let first = submit(&scheduler, 1, 5);
    handle.wait_started(1);
    let others: Vec<Submission> = (2..5).map(|name| submit(&scheduler, name, 5)).collect();
    until("all wait", || scheduler.stats().waiting_requests == 3);
    handle.release();
    let first = wait(first).unwrap();
    assert_eq!((first.timings.batch_size, first.logits), (1, outcome(&tree(1, 5)).logits));
    for (name, other) in (2..5).zip(others) {
        let other = wait(other).unwrap();
        assert_eq!((other.timings.batch_size, other.logits), (3, outcome(&tree(name, 5)).logits));
        assert!(other.timings.queue > Duration::ZERO);
    }
    let stats = scheduler.stats();
    assert_eq!((stats.batches, stats.batched_requests, stats.batched_tokens), (2, 4, 20));
    assert!(stats.waited > Duration::ZERO);
}

#[test]
fn first_in_first_out_within_the_budgets() {
    let options = SchedulerOptions { batch_requests: 3, batch_tokens: 10, ..SchedulerOptions::default() };
    let (scheduler, handle) = start(options);
    handle.hold();
    let mut all = vec![submit(&scheduler, 0, 2)];
    handle.wait_started(1);
    // 1 and 2 fill the tokens; 3 to 5 fill the requests; 6 is larger than any batch and goes alone.
    for (name, tokens) in [(1, 5), (2, 5), (3, 2), (4, 2), (5, 2), (6, 11), (7, 2)] {
        all.push(submit(&scheduler, name, tokens));
    }
    handle.release();
    for submission in all {
        wait(submission).unwrap();
    }
    assert_eq!(names(&handle), [vec![0], vec![1, 2], vec![3, 4, 5], vec![6], vec![7]]);
}

#[test]
fn never_more_than_64_requests_in_a_default_batch() {
    let (scheduler, handle) = start(SchedulerOptions::default());
    handle.hold();
    let mut all = vec![submit(&scheduler, 0, 3)];
    handle.wait_started(1);
    all.extend((1..101).map(|name| submit(&scheduler, name, 3)));
    handle.release();
    for submission in all {
        wait(submission).unwrap();
    }
    assert_eq!(handle.batches().iter().map(Vec::len).collect::<Vec<_>>(), [1, 64, 36]);
}

#[test]
fn requests_and_tokens_are_bounded_before_anything_is_queued() {
    let options = SchedulerOptions { queue_requests: 2, queue_tokens: 20, ..SchedulerOptions::default() };
    let (scheduler, handle) = start(options);
    handle.hold();
    let running = submit(&scheduler, 1, 15);
    handle.wait_started(1);
    let second = scheduler.admit().unwrap();
    assert_eq!(scheduler.admit().unwrap_err(), Refusal::Requests { limit: 2 });
    assert_eq!(scheduler.check(), Err(Refusal::Requests { limit: 2 }));
    let refused = wait(Box::pin(second.submit(tree(2, 6), later()))).unwrap_err();
    assert_eq!(refused, Failure::Refused(Refusal::Tokens { tokens: 6, limit: 20 }));
    let third = scheduler.admit().unwrap();
    let refused = wait(Box::pin(third.submit(tree(3, 21), later()))).unwrap_err();
    assert_eq!(refused, Failure::Refused(Refusal::TooLarge { tokens: 21, limit: 20 }));
    handle.release();
    drop(wait(running).unwrap());
    assert_eq!(names(&handle), [vec![1]]);
    let stats = scheduler.stats();
    assert_eq!((stats.admitted_requests, stats.admitted_tokens), (0, 0));
}

#[test]
fn a_caller_that_leaves_before_dispatch_is_never_run_and_frees_its_place() {
    let (scheduler, handle) = start(SchedulerOptions { queue_requests: 3, ..SchedulerOptions::default() });
    handle.hold();
    let running = submit(&scheduler, 1, 3);
    handle.wait_started(1);
    let leaving = submit(&scheduler, 2, 3);
    let staying = submit(&scheduler, 3, 3);
    assert!(scheduler.admit().is_err());
    drop(leaving);
    // While the device is still busy.
    until("the place is free", || scheduler.stats().admitted_requests == 2);
    assert_eq!(scheduler.stats().departed, 1);
    let fourth = submit(&scheduler, 4, 3);
    handle.release();
    for submission in [running, staying, fourth] {
        wait(submission).unwrap();
    }
    assert_eq!(names(&handle), [vec![1], vec![3, 4]]);
}

#[test]
fn a_caller_that_leaves_after_dispatch_holds_its_place_until_the_device_is_done() {
    let (scheduler, handle) = start(SchedulerOptions { queue_requests: 1, ..SchedulerOptions::default() });
    handle.hold();
    let running = submit(&scheduler, 1, 3);
    handle.wait_started(1);
    drop(running);
    assert_eq!(scheduler.admit().unwrap_err(), Refusal::Requests { limit: 1 });
    assert_eq!(scheduler.stats().running_requests, 1);
    handle.release();
    until("the place is free", || scheduler.check().is_ok());
    let stats = scheduler.stats();
    assert_eq!((stats.batches, stats.departed, stats.admitted_requests), (1, 0, 0));
}

#[test]
fn forty_callers_that_leave_at_once_leave_nothing_behind() {
    let (scheduler, handle) = start(SchedulerOptions::default());
    handle.hold();
    let all: Vec<Submission> = (0..40).map(|name| submit(&scheduler, name, 64)).collect();
    handle.wait_started(1);
    let dispatched = handle.batches()[0].len();
    drop(all);
    // A place is freed after its departure was counted.
    until("the places are free", || scheduler.stats().admitted_requests == dispatched);
    let stats = scheduler.stats();
    assert_eq!((stats.departed as usize, stats.waiting_requests), (40 - dispatched, 0));
    handle.release();
    answered(&scheduler, 41);
    assert_eq!(names(&handle).len(), 2);
    assert_eq!(scheduler.stats().admitted_requests, 0);
}

#[test]
fn a_passed_deadline_is_reported_while_the_device_is_busy_and_never_run() {
    let (scheduler, handle) = start(SchedulerOptions::default());
    handle.hold();
    let running = submit(&scheduler, 1, 3);
    handle.wait_started(1);
    let soon = Instant::now() + Duration::from_millis(20);
    let expiring = queued(scheduler.admit().unwrap(), tree(2, 3), soon);
    let patient = submit(&scheduler, 3, 3);
    assert_eq!(wait(expiring).unwrap_err(), Failure::Deadline);
    assert_eq!(scheduler.stats().admitted_requests, 2);
    // Already passed when submitted.
    let late = Box::pin(scheduler.admit().unwrap().submit(tree(4, 3), Instant::now()));
    assert_eq!(wait(late).unwrap_err(), Failure::Deadline);
    handle.release();
    wait(running).unwrap();
    wait(patient).unwrap();
    assert_eq!(names(&handle), [vec![1], vec![3]]);
    assert_eq!(scheduler.stats().expired, 2);
}

#[test]
fn a_deadline_that_passes_on_the_device_does_not_stop_the_answer() {
    let (scheduler, handle) = start(SchedulerOptions::default());
    handle.hold();
    let deadline = Instant::now() + Duration::from_millis(50);
    let running = queued(scheduler.admit().unwrap(), tree(1, 3), deadline);
    handle.wait_started(1);
    while Instant::now() < deadline {
        std::thread::yield_now();
    }
    handle.release();
    wait(running).unwrap();
}

#[test]
fn a_permit_given_back_submits_again() {
    let options = SchedulerOptions { queue_requests: 1, queue_tokens: 20, ..SchedulerOptions::default() };
    let (scheduler, handle) = start(options);
    let mut permit = scheduler.admit().unwrap();
    permit.reserve(9).unwrap();
    for name in 0..5 {
        permit = wait(queued_or_done(permit, tree(name, 9))).unwrap().permit;
        assert_eq!(scheduler.stats().admitted_tokens, 9);
    }
    drop(permit);
    assert_eq!(scheduler.stats().admitted_tokens, 0);
    assert_eq!(names(&handle), (0..5).map(|name| vec![name]).collect::<Vec<_>>());
}

fn queued_or_done(permit: Permit, tree: Tree) -> Submission {
    Box::pin(permit.submit(tree, later()))
}

#[test]
fn a_fault_retires_for_good_and_is_known_before_a_place_is_free() {
    for fault in [Fault::Error, Fault::Panic, Fault::Missing] {
        let (scheduler, handle) =
            start(SchedulerOptions { queue_requests: 3, ..SchedulerOptions::default() });
        handle.hold();
        let running = submit(&scheduler, 1, 3);
        handle.wait_started(1);
        let waiting = submit(&scheduler, 2, 3);
        let admitted = scheduler.admit().unwrap();
        // Tries to get in all the time: the first answer that is not "full" must be the failure.
        let knocking = {
            let scheduler = Arc::clone(&scheduler);
            std::thread::spawn(move || {
                loop {
                    match scheduler.admit() {
                        Err(Refusal::Requests { .. }) => std::thread::yield_now(),
                        other => return other.map(|_| ()),
                    }
                }
            })
        };
        handle.fault(fault);
        handle.release();
        let failed = wait(running).unwrap_err();
        assert!(matches!(failed, Failure::Inference { .. }), "{fault:?}: {failed:?}");
        assert!(matches!(scheduler.closed(), Some(Refusal::Retired { .. })));
        assert!(matches!(wait(waiting).unwrap_err(), Failure::Retired { .. }));
        assert!(matches!(knocking.join().unwrap(), Err(Refusal::Retired { .. })), "{fault:?}");
        until("the line is closed", || scheduler.stats().admitted_requests == 1);
        let late = wait(queued_or_done(admitted, tree(3, 3))).unwrap_err();
        assert!(matches!(late, Failure::Retired { .. }), "{late:?}");
        assert!(matches!(scheduler.admit(), Err(Refusal::Retired { .. })));
        assert_eq!(names(&handle), [vec![1]]);
        assert_eq!(scheduler.drain(Duration::from_secs(60)), Ok(()));
        assert_eq!(scheduler.stats().admitted_requests, 0);
    }
}

#[test]
fn draining_refuses_the_new_and_finishes_the_admitted() {
    let (scheduler, handle) = start(SchedulerOptions::default());
    handle.hold();
    let running = submit(&scheduler, 1, 3);
    handle.wait_started(1);
    let waiting = submit(&scheduler, 2, 3);
    let preparing = scheduler.admit().unwrap();
    scheduler.begin_drain();
    assert_eq!(scheduler.admit().unwrap_err(), Refusal::Draining);
    assert_eq!(scheduler.closed(), Some(Refusal::Draining));
    let prepared = queued(preparing, tree(3, 3), later());
    let drain = {
        let scheduler = Arc::clone(&scheduler);
        std::thread::spawn(move || scheduler.drain(Duration::from_secs(60)))
    };
    handle.release();
    for submission in [running, waiting, prepared] {
        wait(submission).unwrap();
    }
    assert_eq!(drain.join().unwrap(), Ok(()));
}

#[test]
fn draining_too_long_tells_those_who_wait() {
    let (scheduler, handle) = start(SchedulerOptions::default());
    handle.hold();
    let running = submit(&scheduler, 1, 3);
    handle.wait_started(1);
    let waiting = submit(&scheduler, 2, 3);
    assert_eq!(scheduler.drain(Duration::ZERO), Err(DrainTimeout { left: 2 }));
    assert_eq!(wait(waiting).unwrap_err(), Failure::Stopped);
    handle.release();
    wait(running).unwrap();
    assert_eq!(names(&handle), [vec![1]]);
}

#[test]
fn dropping_the_scheduler_tells_those_who_wait() {
    let (scheduler, handle) = start(SchedulerOptions::default());
    handle.hold();
    let running = submit(&scheduler, 1, 3);
    handle.wait_started(1);
    let waiting = submit(&scheduler, 2, 3);
    drop(scheduler);
    assert_eq!(wait(waiting).unwrap_err(), Failure::Stopped);
    handle.release();
    wait(running).unwrap();
}

#[test]
fn options_of_zero_are_refused_by_name() {
    let good = SchedulerOptions::default();
    let bad = [
        (SchedulerOptions { queue_requests: 0, ..good }, "queue requests"),
        (SchedulerOptions { queue_tokens: 0, ..good }, "queue tokens"),
        (SchedulerOptions { batch_requests: 0, ..good }, "batch requests"),
        (SchedulerOptions { batch_tokens: 0, ..good }, "batch tokens"),
    ];
    for (options, name) in bad {
        let error = Scheduler::start(fake().0, options).unwrap_err();
        assert!(matches!(error, StartError::Zero { option } if option == name), "{error}");
    }
}

/// Many callers at once that stay, leave or run out of time: everyone who stays gets its own answer, batches keep order
/// per caller and budget, and nothing is left inside.
#[test]
fn stress() {
    let options =
        SchedulerOptions { queue_requests: 24, queue_tokens: 400, batch_requests: 5, batch_tokens: 40 };
    let (scheduler, handle) = start(options);
    let callers: Vec<_> = (0..8u32)
        .map(|caller| {
            let scheduler = Arc::clone(&scheduler);
            std::thread::spawn(move || {
                let mut answered = 0;
                for round in 0..400u32 {
                    let name = caller * 1000 + round;
                    let size = 2 + (name as usize * 7919) % 60;
                    let Ok(permit) = scheduler.admit() else { continue };
                    let deadline = if name % 11 == 0 { Instant::now() } else { later() };
                    let mut submission: Submission = Box::pin(permit.submit(tree(name, size), deadline));
                    if name % 7 == 0 {
                        let _ = submission.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                        continue;
                    }
                    match wait(submission) {
                        Ok(result) => {
                            assert_eq!(result.logits, outcome(&tree(name, size)).logits);
                            answered += 1;
                        }
                        Err(Failure::Deadline) => assert_eq!(name % 11, 0),
                        Err(Failure::Refused(Refusal::Tokens { .. })) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
                answered
            })
        })
        .collect();
    let answered: usize = callers.into_iter().map(|caller| caller.join().unwrap()).sum();
    assert_eq!(scheduler.drain(Duration::from_secs(60)), Ok(()));
    let stats = scheduler.stats();
    assert_eq!((stats.admitted_requests, stats.admitted_tokens), (0, 0));
    assert_eq!((stats.waiting_requests, stats.waiting_tokens, stats.running_requests), (0, 0, 0));
    let mut last = [None; 8];
    let mut ran = 0;
    for batch in handle.batches() {
        let tokens: usize = batch.iter().map(Tree::input_tokens).sum();
        assert!(
            batch.len() <= 5 && (tokens <= 40 || batch.len() == 1),
            "{} trees, {tokens} tokens",
            batch.len()
        );
        for tree in batch {
            let name = tree.state[0];
            let caller = (name / 1000) as usize;
            assert!(last[caller] < Some(name), "caller {caller}: {name} was overtaken");
            last[caller] = Some(name);
            ran += 1;
        }
    }
    assert!(ran >= answered, "{ran} ran, {answered} were answered");
    assert_eq!(stats.batched_requests as usize, ran);
}

#[test]
fn devices_share_a_line_and_the_last_one_to_fail_retires_the_model() {
    let ((first, one), (second, two)) = (fake(), fake());
    let options = SchedulerOptions { batch_requests: 1, ..SchedulerOptions::default() };
    let scheduler = Scheduler::start_all(vec![first, second], options).unwrap();
    one.hold();
    two.hold();
    let running = [submit(&scheduler, 1, 3), submit(&scheduler, 2, 3)];
    one.wait_started(1);
    two.wait_started(1);
    let stats = scheduler.stats();
    assert_eq!((stats.running_requests, stats.devices, stats.working_devices), (2, 2, 2));

    // One fails: its batch is lost, the other takes what waits, and the model is not retired.
    let waiting = [submit(&scheduler, 3, 3), submit(&scheduler, 4, 3)];
    one.fault(Fault::Error);
    one.release();
    two.release();
    let outcomes: Vec<_> = running.into_iter().map(wait).collect();
    assert_eq!(outcomes.into_iter().filter(Result::is_err).count(), 1);
    for submission in waiting {
        wait(submission).unwrap();
    }
    assert!(scheduler.closed().is_none());
    assert_eq!((scheduler.stats().working_devices, scheduler.stats().running_requests), (1, 0));
    assert_eq!((one.batches().len(), two.batches().len()), (1, 3));

    two.fault(Fault::Panic);
    let failed = wait(Box::pin(scheduler.admit().unwrap().submit(tree(5, 3), later()))).unwrap_err();
    assert!(matches!(failed, Failure::Inference { .. }), "{failed:?}");
    assert!(matches!(scheduler.closed(), Some(Refusal::Retired { .. })));
    assert_eq!(scheduler.stats().working_devices, 0);
    scheduler.drain(Duration::from_secs(60)).unwrap();

    let none: Vec<testkit::fake::FakeExecutor> = Vec::new();
    let refused = Scheduler::start_all(none, SchedulerOptions::default()).unwrap_err();
    assert!(matches!(refused, StartError::Zero { option: "devices" }), "{refused:?}");
}
