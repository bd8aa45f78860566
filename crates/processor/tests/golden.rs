//! The processor against the reference service, on every golden case. Runs only in the golden tier.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

use std::sync::Arc;

use artifact::{PreTokenizer, Tokenizer};
use processor::pytext::{self, JsonStyle};
use processor::{Processor, ProcessorOptions, RequestError, parse_request};
use testkit::golden::{Case, cases, folder, indices, numbers};

fn processor(date_facts: bool) -> Processor {
    let tokenizer = Tokenizer::open(&folder().join("tokenizer/base"), PreTokenizer::Qwen2).unwrap();
    Processor::new(
        Arc::new(tokenizer),
        2.406050072164233,
        ProcessorOptions { date_facts, ..Default::default() },
    )
}

fn answered() -> impl Iterator<Item = Case> {
    cases().into_iter().filter(|case| case.status == 200)
}

#[test]
fn texts_tokens_positions_and_readouts_are_exact() {
    let processor = processor(false);
    let mut count = 0;
    for case in answered() {
        let request =
            parse_request(case.request.as_bytes()).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        assert_eq!(request.model, case.reference["model"], "{}", case.name);
        let prepared = processor.prepare(&request).unwrap();
        let texts = &case.reference["texts"];
        assert_eq!(prepared.texts.state, texts["state"], "{}", case.name);
        let tokens = &case.reference["tokens"];
        let state: Vec<u64> = prepared.tree.state.iter().map(|id| u64::from(*id)).collect();
        assert_eq!(state, indices(&tokens["state_ids"]), "{}", case.name);
        let branches = tokens["branches"].as_array().unwrap();
        assert_eq!(prepared.tree.branches.len(), branches.len(), "{}", case.name);
        for (index, branch) in prepared.tree.branches.iter().enumerate() {
            let question = &texts["questions"][index];
            let rendered = &prepared.texts.questions[index];
            assert_eq!(request.questions[index].id, question["id"], "{}", case.name);
            assert_eq!(
                request.questions[index].kind.question_type().as_str(),
                question["type"],
                "{}",
                case.name
            );
            assert_eq!(rendered.instructions, question["instructions"], "{}", case.name);
            assert_eq!(serde_json::json!(rendered.options), question["options"], "{}", case.name);
            let recorded = &branches[index];
            let ids: Vec<u64> = branch.tokens.iter().map(|id| u64::from(*id)).collect();
            assert_eq!(ids, indices(&recorded["ids"]), "{} {index}", case.name);
            assert_eq!(branch.decide as u64, recorded["decide"], "{} {index}", case.name);
            assert_eq!(
                serde_json::json!(branch.option_ends),
                recorded["option_ends"],
                "{} {index}",
                case.name
            );
            let first = prepared.tree.state.len();
            assert_eq!(
                serde_json::json!([first, first + ids.len() - 1]),
                recorded["positions"],
                "{}",
                case.name
            );
        }
        assert_eq!(prepared.context.input_tokens as u64, case.reference["input_tokens"], "{}", case.name);
        count += 1;
    }
    println!("{count} cases exact");
    assert!(count > 400);
}

#[test]
fn recorded_probabilities_give_the_recorded_answers() {
    let processor = processor(false);
    let mut count = 0;
    for case in answered() {
        let request = parse_request(case.request.as_bytes()).unwrap();
        let context = processor.prepare(&request).unwrap().context;
        for block in ["a_fp32", "a_bf16"] {
            let Some(outputs) = case.reference.get(block) else { continue };
            let probabilities: Vec<Vec<f32>> = outputs["probabilities"]
                .as_array()
                .unwrap()
                .iter()
                .map(|row| numbers(row).into_iter().map(|p| p as f32).collect())
                .collect();
            let answers = processor::answers(&context, &probabilities).unwrap();
            assert_eq!(
                pytext::answers(&answers, JsonStyle::Compact),
                outputs["answers_text"],
                "{} {block}",
                case.name
            );
            assert_eq!(
                processor.output_tokens(&answers).unwrap() as u64,
                outputs["output_tokens"],
                "{} {block}",
                case.name
            );
            let logits: Vec<f32> = numbers(&outputs["logits"][0]).into_iter().map(|z| z as f32).collect();
            for (ours, theirs) in
                processor::softmax(&logits, 2.406050072164233).unwrap().iter().zip(&probabilities[0])
            {
                assert!((ours - theirs).abs() <= 1e-6, "{} {block}: {ours} {theirs}", case.name);
            }
            count += 1;
        }
    }
    println!("{count} answer blocks exact");
    assert!(count > 500);
}

#[test]
fn refused_cases_are_refused() {
    let processor = processor(false);
    let mut count = 0;
    for case in cases().into_iter().filter(|case| case.status != 200) {
        let outcome = parse_request(case.request.as_bytes()).and_then(|request| processor.prepare(&request));
        let Err(error) = outcome else { panic!("{} was accepted", case.name) };
        let unparsable = matches!(error, RequestError::Unparsable(_));
        assert!(case.status == 500 || unparsable == (case.status == 400), "{}: {error}", case.name);
        if let RequestError::NotJson { message, position } = &error
            && case.status == 422
        {
            let body: serde_json::Value =
                serde_json::from_str(case.reference["body_text"].as_str().unwrap()).unwrap();
            assert_eq!(body["detail"][0]["loc"][1], *position, "{}", case.name);
            assert_eq!(body["detail"][0]["ctx"]["error"], *message, "{}", case.name);
        }
        count += 1;
    }
    println!("{count} cases refused");
    assert!(count > 30);
}

#[test]
fn date_facts_are_those_of_the_reference() {
    let processor = processor(true);
    // The reference doubles an annotation of a string and counts the dates of one in an object; ours replaces it.
    let replaced = ["dates/with-facts-already", "dates/object-with-facts"];
    let mut count = 0;
    for case in answered() {
        let Some(recorded) = case.reference.get("date_facts") else { continue };
        let prepared = processor.prepare(&parse_request(case.request.as_bytes()).unwrap()).unwrap();
        let same = prepared.texts.state == recorded["state"];
        assert_eq!(same, !replaced.contains(&case.name.as_str()), "{}: {}", case.name, prepared.texts.state);
        if same {
            let ids: Vec<u64> = prepared.tree.state.iter().map(|id| u64::from(*id)).collect();
            assert_eq!(ids, indices(&recorded["state_ids"]), "{}", case.name);
        }
        count += 1;
    }
    assert!(count >= 20, "{count}");
}
