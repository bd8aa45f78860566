//! The engine on a GPU: against the CPU, and against itself in other company. Built only for machines that have one: without
//! a device every test fails.
#![allow(clippy::unwrap_used)] // A failure here is a failed test.

use artifact::Export;
use decision::{Outcome, Tree};
use executor::{CacheLimits, CudaOptions, CudaProfile, ExecutorError, ExecutorOptions, open_cpu, open_cuda};
use scheduler::Execute;
use testkit::checkpoint::{released_heads, tiny};
use testkit::trees::Trees;

const PROFILES: [CudaProfile; 2] = [CudaProfile::Exact, CudaProfile::Fast];

fn options(pass_tokens: usize) -> ExecutorOptions {
    ExecutorOptions {
        pass_tokens,
        max_row_tokens: 4096,
        max_question_tokens: 512,
        cache: CacheLimits { states: 64, bytes: 256 << 20 },
        threads: 0,
    }
}

fn open(export: &Export, profile: CudaProfile, options: ExecutorOptions) -> impl Execute {
    open_cuda(export, &options, CudaOptions { ordinal: 0, profile, graphs: true }).unwrap()
}

fn bits(outcome: &Outcome) -> Vec<Vec<u32>> {
    outcome.logits.iter().map(|logits| logits.iter().map(|logit| logit.to_bits()).collect()).collect()
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|logit| f64::from(*logit) / temperature).collect();
    let largest = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scaled.iter().map(|logit| (logit - largest).exp()).sum();
    scaled.iter().map(|logit| (logit - largest).exp() / total).collect()
}

/// Largest probability error of every question.
fn errors(first: &[Outcome], second: &[Outcome], temperature: f64) -> Vec<f64> {
    let mut errors: Vec<f64> = first
        .iter()
        .zip(second)
        .flat_map(|(a, b)| a.logits.iter().zip(&b.logits))
        .map(|(a, b)| {
            let (a, b) = (softmax(a, temperature), softmax(b, temperature));
            a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
        })
        .collect();
    errors.sort_by(f64::total_cmp);
    errors
}

fn trees(export: &Export, count: usize) -> Vec<Tree> {
    let mut random = Trees::new(5, export.geometry.vocab);
    let edges = [1, 2, 63, 64, 65, 127, 128, 129, 300, 511, 512, 513, 700, 1100, 2200];
    (0..count)
        .map(|index| {
            let state = if index < edges.len() { edges[index] } else { 1 + random.below(200) };
            let questions: Vec<usize> = (0..1 + random.below(6)).map(|_| 1 + random.below(90)).collect();
            random.tree(state, &questions)
        })
        .collect()
}

#[test]
fn profiles_agree_with_the_cpu() {
    for (name, (_dir, export)) in [("tiny", tiny(3).unwrap()), ("released heads", released_heads(3).unwrap())]
    {
        let trees = trees(&export, 80);
        let oracle = open_cpu(&export, &ExecutorOptions::default()).unwrap().execute(&trees).unwrap();
        for (profile, limit) in [(CudaProfile::Exact, 2e-5), (CudaProfile::Fast, 0.03)] {
            let outcomes = open(&export, profile, options(2048)).execute(&trees).unwrap();
            let errors = errors(&oracle, &outcomes, export.temperature);
            let at = |share: f64| errors[((errors.len() - 1) as f64 * share) as usize];
            println!(
                "{name} {profile:?}: {} questions, p50 {:.2e}, p99 {:.2e}, max {:.2e}",
                errors.len(),
                at(0.5),
                at(0.99),
                at(1.0)
            );
            assert!(errors.len() >= 200 && at(1.0) <= limit, "{name} {profile:?}: {:.2e}", at(1.0));
        }
    }
}

#[test]
fn company_passes_and_the_cache_change_no_bit() {
    for (_dir, export) in [tiny(3).unwrap(), released_heads(3).unwrap()] {
        let trees = trees(&export, 64);
        for profile in PROFILES {
            let mut fresh = open(
                &export,
                profile,
                ExecutorOptions { cache: CacheLimits { states: 0, bytes: 0 }, ..options(4096) },
            );
            let alone: Vec<_> = trees
                .iter()
                .map(|tree| bits(&fresh.execute(std::slice::from_ref(tree)).unwrap()[0]))
                .collect();
            for pass_tokens in [512, 1024, 8192] {
                let mut executor = open(&export, profile, options(pass_tokens));
                for round in ["new", "kept"] {
                    let outcomes = executor.execute(&trees).unwrap();
                    for (index, (outcome, alone)) in outcomes.iter().zip(&alone).enumerate() {
                        let kept = outcome.cached_tokens > 0;
                        assert_eq!(&bits(outcome), alone, "{profile:?} {pass_tokens} {round} {index} {kept}");
                    }
                }
            }
        }
    }
}

#[test]
fn recorded_passes_give_the_bits_of_launched_ones() {
    let (_dir, export) = released_heads(3).unwrap();
    let mut random = Trees::new(8, export.geometry.vocab);
    for profile in PROFILES {
        let open =
            |graphs| open_cuda(&export, &options(4096), CudaOptions { ordinal: 0, profile, graphs }).unwrap();
        let (mut recorded, mut launched) = (open(true), open(false));
        // Around the edges of every shape: rows, questions, gathered rows, spans of keys; new, then kept.
        for rows in [20, 31, 32, 33, 63, 64, 65, 200, 293, 319, 320, 321, 500, 512, 513, 600, 1100, 3000] {
            for questions in [1, 2, 7, 8, 9] {
                let length = 12 + random.below(12);
                let state = if rows > questions * length { rows - questions * length } else { 5 };
                let tree = random.tree(state, &vec![length; questions]);
                for round in ["new", "kept"] {
                    let first = bits(&recorded.execute(std::slice::from_ref(&tree)).unwrap()[0]);
                    let second = bits(&launched.execute(std::slice::from_ref(&tree)).unwrap()[0]);
                    assert_eq!(first, second, "{profile:?} {rows} rows, {questions} questions, {round}");
                }
            }
        }
    }
}

#[test]
fn questions_in_another_order_get_the_same_bits() {
    let (_dir, export) = released_heads(3).unwrap();
    for profile in PROFILES {
        let mut executor = open(&export, profile, options(2048));
        for tree in trees(&export, 20) {
            let mut reversed = tree.clone();
            reversed.branches.reverse();
            let forward = bits(&executor.execute(&[tree]).unwrap()[0]);
            let mut backward = bits(&executor.execute(&[reversed]).unwrap()[0]);
            backward.reverse();
            assert_eq!(forward, backward, "{profile:?}");
        }
    }
}

#[test]
fn a_plan_that_the_device_cannot_hold_is_refused_with_its_parts() {
    let (_dir, export) = tiny(3).unwrap();
    let cache = CacheLimits { states: 4, bytes: 4 << 40 };
    let error = open_cuda(
        &export,
        &ExecutorOptions { cache, ..options(512) },
        CudaOptions { ordinal: 0, profile: CudaProfile::Fast, graphs: true },
    );
    match error {
        Err(ExecutorError::Memory { .. } | ExecutorError::Model(_)) => {}
        Err(other) => assert_eq!(other.to_string(), "a refusal for want of memory"),
        Ok(_) => assert_eq!("opened", "a refusal for want of memory"),
    }
}
