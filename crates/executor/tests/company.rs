//! The CPU engine against itself: the same bits whatever shares a batch, a pass, the cache or the memory.
#![allow(clippy::unwrap_used)] // A failure here is a failed test.

use decision::{Outcome, Tree};
use executor::{CacheLimits, Executor, ExecutorOptions, open_cpu};
use scheduler::Execute;
use testkit::checkpoint::tiny;
use testkit::trees::Trees;

fn bits(outcome: &Outcome) -> Vec<Vec<u32>> {
    outcome.logits.iter().map(|logits| logits.iter().map(|logit| logit.to_bits()).collect()).collect()
}

/// Trees of lengths around every edge: chunks of 64, passes of 128, spans of 512.
fn trees(vocab: usize) -> Vec<Tree> {
    let mut trees = Trees::new(7, vocab);
    let mut all: Vec<Tree> = [1, 2, 63, 64, 65, 127, 128, 129, 200, 300, 511, 513]
        .into_iter()
        .map(|state| {
            let questions: Vec<usize> = (0..1 + trees.below(4)).map(|_| 1 + trees.below(90)).collect();
            trees.tree(state, &questions)
        })
        .collect();
    // A state that another tree has too.
    let shared = all[4].state.clone();
    all.push(Tree { state: shared, ..trees.tree(1, &[20, 70]) });
    all
}

fn open(export: &artifact::Export, options: ExecutorOptions) -> Executor<impl backend::Ops + use<>> {
    open_cpu(export, &options).unwrap()
}

fn alone(export: &artifact::Export, trees: &[Tree]) -> Vec<Vec<Vec<u32>>> {
    trees
        .iter()
        .map(|tree| {
            let mut executor = open(export, ExecutorOptions::default());
            bits(&executor.execute(std::slice::from_ref(tree)).unwrap()[0])
        })
        .collect()
}

#[test]
fn company_passes_threads_and_the_cache_change_no_bit() {
    let (_dir, export) = tiny(3).unwrap();
    let trees = trees(export.geometry.vocab);
    let expected = alone(&export, &trees);
    for pass_tokens in [64, 128, 1024] {
        for threads in [1, 2, 3] {
            let options = ExecutorOptions { pass_tokens, threads, ..ExecutorOptions::default() };
            let mut executor = open(&export, options);
            // The second time, states come from the cache.
            for round in 0..2 {
                let outcomes = executor.execute(&trees).unwrap();
                for (outcome, expected) in outcomes.iter().zip(&expected) {
                    assert_eq!(&bits(outcome), expected, "{pass_tokens} {threads} {round}");
                }
            }
        }
    }
}

#[test]
fn many_short_questions_are_split_into_passes_and_exercise_leaves_nothing() {
    let (_dir, export) = tiny(3).unwrap();
    let tree = Trees::new(4, export.geometry.vocab).tree(70, &[8; 600]);
    let options = ExecutorOptions { pass_tokens: 8192, ..ExecutorOptions::default() };
    let mut executor = open(&export, options);
    executor.exercise().unwrap();
    let kept = executor.cache_stats().states.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(kept, 0);
    let outcome = executor.execute(std::slice::from_ref(&tree)).unwrap().remove(0);
    assert_eq!(bits(&outcome), alone(&export, &[tree])[0]);
}

#[test]
fn the_order_of_questions_changes_no_bit() {
    let (_dir, export) = tiny(3).unwrap();
    let mut executor = open(&export, ExecutorOptions::default());
    for tree in trees(export.geometry.vocab) {
        let mut reversed = tree.clone();
        reversed.branches.reverse();
        let forward = bits(&executor.execute(&[tree]).unwrap()[0]);
        let mut backward = bits(&executor.execute(&[reversed]).unwrap()[0]);
        backward.reverse();
        assert_eq!(forward, backward);
    }
}

#[test]
fn memory_that_is_always_short_changes_no_bit_and_never_fails() {
    let (_dir, export) = tiny(3).unwrap();
    let mut random = Trees::new(11, export.geometry.vocab);
    let longest = 600;
    let trees: Vec<Tree> = (0..40)
        .map(|_| {
            let state = 1 + random.below(500);
            let questions: Vec<usize> = (0..1 + random.below(5)).map(|_| 1 + random.below(90)).collect();
            random.tree(state, &questions)
        })
        .collect();
    let expected = alone(&export, &trees);
    for (states, bytes) in [(0, 0), (1, 1 << 20), (3, 1 << 18), (64, 1 << 22)] {
        let options = ExecutorOptions {
            pass_tokens: 64,
            max_row_tokens: longest,
            max_question_tokens: 100,
            cache: CacheLimits { states, bytes },
            threads: 1,
        };
        let mut executor = open(&export, options);
        for batch in [1, 7, 40] {
            for (trees, expected) in trees.chunks(batch).zip(expected.chunks(batch)) {
                for (outcome, expected) in executor.execute(trees).unwrap().iter().zip(expected) {
                    assert_eq!(
                        &bits(outcome),
                        expected,
                        "{states} states, {bytes} bytes, batches of {batch}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_longest_row_that_was_planned_for_fits_and_warm_up_succeeds() {
    let (_dir, export) = tiny(3).unwrap();
    let options = ExecutorOptions {
        pass_tokens: 128,
        max_row_tokens: 1000,
        max_question_tokens: 200,
        cache: CacheLimits { states: 2, bytes: 1 << 20 },
        threads: 2,
    };
    let mut executor = open(&export, options);
    executor::warm_up(&mut executor, &export).unwrap();
    let tree = Trees::new(1, export.geometry.vocab).tree(800, &[200, 200, 200, 200]);
    let outcome = executor.execute(std::slice::from_ref(&tree)).unwrap().remove(0);
    assert_eq!(bits(&outcome), alone(&export, &[tree])[0]);
}

#[test]
fn a_failed_operation_retires_the_model() {
    let (_dir, export) = tiny(3).unwrap();
    let mut executor = open(&export, ExecutorOptions::default());
    let good = Trees::new(9, export.geometry.vocab).tree(45, &[30, 40]);
    assert_eq!(executor.execute(std::slice::from_ref(&good)).unwrap()[0].logits.len(), 2);
    // No such token exists, so the first operation of the pass fails; validation keeps this from real requests.
    let broken = Tree { state: [u32::MAX].into(), ..good.clone() };
    let first = executor.execute(&[broken]).unwrap_err();
    let again = executor.execute(&[good]).unwrap_err();
    assert_eq!(again.reason, first.reason);
}
