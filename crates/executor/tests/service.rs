//! Profile `service` on a GPU: against the CPU's `exact`, against itself with cached states, and what it refuses. Built only for
//! machines that have one.
#![allow(clippy::unwrap_used)] // A failure here is a failed test.

use artifact::Export;
use decision::{Outcome, Tree};
use executor::{CudaMerger, ExecutorError, ExecutorOptions, ServiceExecutor, ServiceOptions, open_cpu};
use scheduler::Execute;
use testkit::checkpoint::{released_heads, released_heads_merged};
use testkit::trees::Trees;

fn options(bucketed: bool) -> ServiceOptions {
    ServiceOptions {
        ordinal: 0,
        max_state_tokens: 4096,
        max_row_tokens: 6144,
        max_question_tokens: 2048,
        bucketed,
    }
}

fn trees(export: &Export) -> Vec<Tree> {
    let mut random = Trees::new(11, export.geometry.vocab);
    // Around chunks, buckets and the longest padded passes; the last state and question run as they are.
    let states = [1, 5, 16, 17, 63, 64, 65, 90, 129, 500, 1000, 1024, 1025, 2500];
    states
        .iter()
        .map(|state| {
            let mut questions: Vec<usize> = (0..1 + random.below(7)).map(|_| 1 + random.below(90)).collect();
            if *state == 90 {
                questions.extend([1024, 1200]);
            }
            random.tree(*state, &questions)
        })
        .collect()
}

fn worst(first: &[Outcome], second: &[Outcome], temperature: f64) -> f64 {
    let softmax = |logits: &[f32]| -> Vec<f64> {
        let scaled: Vec<f64> = logits.iter().map(|logit| (f64::from(*logit) / temperature).exp()).collect();
        let total: f64 = scaled.iter().sum();
        scaled.iter().map(|x| x / total).collect()
    };
    let questions = first.iter().zip(second).flat_map(|(a, b)| a.logits.iter().zip(&b.logits));
    questions
        .flat_map(|(a, b)| {
            assert_eq!(a.len(), b.len());
            softmax(a).into_iter().zip(softmax(b)).map(|(a, b)| (a - b).abs()).collect::<Vec<_>>()
        })
        .fold(0.0, f64::max)
}

#[test]
fn passes_in_any_form_are_as_near_to_exact_as_bf16_allows() {
    let merger = CudaMerger::open(0).unwrap();
    let (_dir, export) = released_heads_merged(3, &merger).unwrap();
    let trees = trees(&export);
    let exact = ExecutorOptions { pass_tokens: 4096, ..ExecutorOptions::default() };
    let exact = open_cpu(&export, &exact).unwrap().execute(&trees).unwrap();
    for bucketed in [true, false] {
        let mut service = ServiceExecutor::open(&export, &options(bucketed)).unwrap();
        let alone: Vec<Outcome> =
            trees.iter().flat_map(|tree| service.execute(std::slice::from_ref(tree)).unwrap()).collect();
        let together = service.execute(&trees).unwrap();
        for (name, found) in [("alone", &alone), ("together", &together)] {
            let error = worst(&exact, found, export.temperature);
            println!("bucketed {bucketed}, {name}: largest error {error:.2e}");
            assert!(error > 0.0 && error < 0.03, "bucketed {bucketed}, {name}: {error}");
        }
        // The same request again: its state is kept, and its rows see the same bits.
        let last = &trees[trees.len() - 1..];
        let again = service.execute(last).unwrap();
        assert_eq!(again[0].cached_tokens, last[0].state.len());
        let fresh = ServiceExecutor::open(&export, &options(bucketed)).unwrap().execute(last).unwrap();
        assert_eq!(again[0].logits, fresh[0].logits);
    }
}

#[test]
fn a_merge_of_the_cpu_and_too_little_memory_are_refused() {
    let (_dir, export) = released_heads(3).unwrap();
    let refused = ServiceExecutor::open(&export, &options(true)).err();
    assert!(matches!(refused, Some(ExecutorError::Merged { .. })), "{refused:?}");
    let merger = CudaMerger::open(0).unwrap();
    let (_dir, export) = released_heads_merged(3, &merger).unwrap();
    let enormous = ServiceOptions { max_row_tokens: 1 << 30, ..options(true) };
    let refused = ServiceExecutor::open(&export, &enormous).err();
    assert!(matches!(refused, Some(ExecutorError::Memory { .. })), "{refused:?}");
}
