//! The CPU engine against the reference's FP32 outputs, and against itself in other batches. Runs only in the golden tier.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

use artifact::{Export, ExportOptions, OpenOptions, Silent, export};
use decision::{Branch, Tree};
use executor::{CacheLimits, ExecutorOptions, open_cpu};
use scheduler::Execute;
use testkit::golden::{cases, folder, indices, numbers};

fn opened(dir: &std::path::Path) -> Export {
    let options = ExportOptions {
        adapter: folder().join("tiny-a/adapter"),
        base: folder().join("tiny-a/base"),
        out: dir.join("export"),
        pins: None,
        exact_companion: true,
        commit: None,
    };
    export(&options, &Silent).unwrap();
    Export::open(&options.out, &OpenOptions::default()).unwrap()
}

/// Trees and recorded logits of every answered case with at most `longest` tokens in its state.
fn recorded(longest: usize) -> Vec<(String, Tree, Vec<Vec<f64>>)> {
    let mut all = Vec::new();
    for case in cases().into_iter().filter(|case| case.status == 200) {
        let tokens = &case.reference["tokens"];
        let ids = |value| indices(value).into_iter().map(|id| id as u32).collect::<Vec<u32>>();
        let state = ids(&tokens["state_ids"]);
        if state.len() > longest {
            continue;
        }
        let branches = tokens["branches"].as_array().unwrap();
        let branches = branches
            .iter()
            .map(|branch| Branch {
                tokens: ids(&branch["ids"]),
                decide: branch["decide"].as_u64().unwrap() as usize,
                option_ends: indices(&branch["option_ends"]).into_iter().map(|end| end as usize).collect(),
            })
            .collect();
        let logits = case.reference["a_fp32"]["logits"].as_array().unwrap().iter().map(numbers).collect();
        all.push((case.name, Tree { state: state.into(), branches }, logits));
    }
    all
}

fn softmax(logits: impl Iterator<Item = f64>) -> Vec<f64> {
    let weights: Vec<f64> = logits.map(|logit| (logit / 2.406050072164233).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

#[test]
fn probabilities_are_within_1e_5_of_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let export = opened(dir.path());
    let mut executor = open_cpu(&export, &ExecutorOptions::default()).unwrap();
    executor::warm_up(&mut executor, &export).unwrap();
    let (mut worst, mut questions) = (0f64, 0);
    for (name, tree, logits) in recorded(usize::MAX) {
        let outcome = executor.execute(std::slice::from_ref(&tree)).unwrap().remove(0);
        for (ours, theirs) in outcome.logits.iter().zip(&logits) {
            assert_eq!(ours.len(), theirs.len(), "{name}");
            let ours = softmax(ours.iter().map(|logit| f64::from(*logit)));
            let theirs = softmax(theirs.iter().copied());
            for (a, b) in ours.iter().zip(&theirs) {
                worst = worst.max((a - b).abs());
                assert!((a - b).abs() <= 1e-5, "{name}: {a} {b}");
            }
            questions += 1;
        }
    }
    println!("{questions} questions, largest difference {worst:.2e}");
    assert!(questions > 1000);
}

#[test]
fn answers_are_the_same_bits_in_any_company() {
    let dir = tempfile::tempdir().unwrap();
    let export = opened(dir.path());
    let cases = recorded(600);
    let trees: Vec<Tree> = cases.iter().take(64).map(|(_, tree, _)| tree.clone()).collect();
    let options = |pass_tokens, threads, states| ExecutorOptions {
        pass_tokens,
        threads,
        cache: CacheLimits { states, bytes: 1 << 30 },
        ..ExecutorOptions::default()
    };
    let mut alone = open_cpu(&export, &options(512, 1, 0)).unwrap();
    let expected: Vec<Vec<Vec<f32>>> = trees
        .iter()
        .map(|tree| alone.execute(std::slice::from_ref(tree)).unwrap().remove(0).logits)
        .collect();
    for (pass_tokens, threads, states) in [(512, 2, 0), (8192, 1, 100), (64, 2, 4), (1024, 3, 100)] {
        let mut executor = open_cpu(&export, &options(pass_tokens, threads, states)).unwrap();
        for round in 0..2 {
            let outcomes = executor.execute(&trees).unwrap();
            for ((outcome, expected), (name, tree, _)) in outcomes.iter().zip(&expected).zip(&cases) {
                assert_eq!(
                    &outcome.logits, expected,
                    "{name}: {pass_tokens} tokens, {threads} threads, round {round}"
                );
                if round == 1 && states == 100 {
                    assert_eq!(outcome.cached_tokens, tree.state.len(), "{name}");
                }
            }
        }
        let mut turned = trees.clone();
        turned.iter_mut().for_each(|tree| tree.branches.reverse());
        let outcomes = executor.execute(&turned).unwrap();
        for (mut outcome, expected) in outcomes.into_iter().zip(&expected) {
            outcome.logits.reverse();
            assert_eq!(&outcome.logits, expected);
        }
    }
}
