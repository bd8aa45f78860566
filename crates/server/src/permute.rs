//! Owns `POST /v1/systemone/permute`: one choice question asked under several orders of its options, to see how much the
//! order matters.

use std::time::Duration;

use decision::{Answer, Answers, DecisionRequest, Json, Number, Question, QuestionKind};
use processor::pytext::{self, JsonStyle, round4, write_string};
use processor::{PathItem, RequestError, Violation};

use crate::error::ApiError;
use crate::wire::milliseconds;

/// Most orders of one request.
const MAX_RUNS: u64 = 64;
/// Orders when the request does not say.
const DEFAULT_RUNS: u64 = 6;

/// Reads a body into a request whose questions are the same choice under different orders, the given one first.
pub(crate) fn parse(body: &[u8]) -> Result<DecisionRequest, ApiError> {
    let json = processor::parse_json(body)?;
    let Json::Object(mut fields) = json else {
        let message = "Input should be a valid dictionary or object to extract fields from";
        return Err(violation("model_attributes_type", &[], message));
    };
    let runs = integer(&mut fields, "n_perm")?.map_or(Ok(DEFAULT_RUNS), |value| {
        u64::try_from(value)
            .ok()
            .filter(|runs| (1..=MAX_RUNS).contains(runs))
            .ok_or_else(|| violation("value_error", &["n_perm"], "Input should be between 1 and 64"))
    })?;
    // The low 64 bits: any integer of that size, signed or not, is a seed of its own.
    let seed = integer(&mut fields, "seed")?.unwrap_or(0) as u64;
    let name = match fields.swap_remove("question") {
        Some(Json::String(name)) => name,
        Some(_) => return Err(violation("string_type", &["question"], "Input should be a valid string")),
        None => return Err(violation("missing", &["question"], "Field required")),
    };
    let Some(request) = fields.swap_remove("request") else {
        return Err(violation("missing", &["request"], "Field required"));
    };
    let request = processor::validate_request(request)
        .map_err(|error| ApiError::Request { error, prefix: &["request"] })?;
    let question = request.questions.into_iter().find(|question| question.id == name);
    let Some(Question { instructions, kind: QuestionKind::Choice { options }, .. }) = question else {
        return Err(ApiError::NotAChoice);
    };
    let questions = orders(options.len(), runs, seed)
        .into_iter()
        .enumerate()
        .map(|(run, order)| Question {
            id: run.to_string(),
            instructions: instructions.clone(),
            kind: QuestionKind::Choice { options: order.into_iter().map(|i| options[i].clone()).collect() },
        })
        .collect();
    Ok(DecisionRequest { model: request.model, state: request.state, questions })
}

fn violation(kind: &'static str, path: &[&str], message: &str) -> ApiError {
    let path = path.iter().map(|key| PathItem::from(*key)).collect();
    RequestError::Violations(vec![Violation { kind, path, message: message.to_owned(), input: None }]).into()
}

/// An optional integer field of at most 64 bits; `6.0` is an integer too, as in the reference.
fn integer(fields: &mut indexmap::IndexMap<String, Json>, name: &str) -> Result<Option<i128>, ApiError> {
    let wide = i128::from(i64::MIN)..=i128::from(u64::MAX);
    let value = match fields.swap_remove(name) {
        None => return Ok(None),
        Some(Json::Number(Number::Integer(digits))) => digits.parse().ok(),
        Some(Json::Number(Number::Float(value))) if value.fract() == 0.0 => Some(value as i128),
        Some(_) => None,
    };
    match value.filter(|value| wide.contains(value)) {
        Some(value) => Ok(Some(value)),
        None => Err(violation("int_type", &[name], "Input should be an integer of at most 64 bits")),
    }
}

/// The given order, then shuffles of it: Fisher and Yates with numbers of splitmix64, the same for a seed everywhere.
fn orders(options: usize, runs: u64, seed: u64) -> Vec<Vec<usize>> {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..runs)
        .map(|run| {
            let mut order: Vec<usize> = (0..options).collect();
            if run > 0 {
                for last in (1..options).rev() {
                    order.swap(last, (next() % (last as u64 + 1)) as usize);
                }
            }
            order
        })
        .collect()
}

/// The body of the answer: per run its order, probabilities and choice; whether the choice is the same in all, and the
/// largest difference between two runs' probabilities of one option.
pub(crate) fn text(answers: &Answers, probabilities: &[Vec<f32>], latency: Duration) -> String {
    let mut out = String::from("{\"runs\":[");
    let mut choices = Vec::new();
    // Lowest and highest probability per option, unrounded.
    let mut ranges: indexmap::IndexMap<&str, (f32, f32)> = indexmap::IndexMap::new();
    for ((_, answer), row) in answers.iter().zip(probabilities) {
        let Answer::Choice { choice, probabilities, .. } = answer else { continue };
        if !choices.is_empty() {
            out.push(',');
        }
        write_run(&mut out, choice, probabilities, latency);
        choices.push(choice);
        for ((name, _), p) in probabilities.iter().zip(row) {
            let range = ranges.entry(name).or_insert((*p, *p));
            *range = (range.0.min(*p), range.1.max(*p));
        }
    }
    let stable = choices.windows(2).all(|pair| pair[0] == pair[1]);
    let spread = ranges.values().map(|(low, high)| f64::from(*high) - f64::from(*low)).fold(0.0, f64::max);
    out.push_str(&format!("],\"argmax_stable\":{stable},\"spread\":{}}}", pytext::float(round4(spread))));
    out
}

fn write_run(out: &mut String, choice: &str, probabilities: &[(String, f64)], latency: Duration) {
    let comma = |index: usize| if index > 0 { "," } else { "" };
    out.push_str("{\"order\":[");
    for (index, (name, _)) in probabilities.iter().enumerate() {
        out.push_str(comma(index));
        write_string(out, name, JsonStyle::Compact);
    }
    out.push_str("],\"probabilities\":{");
    for (index, (name, p)) in probabilities.iter().enumerate() {
        out.push_str(comma(index));
        write_string(out, name, JsonStyle::Compact);
        out.push(':');
        out.push_str(&pytext::float(*p));
    }
    out.push_str("},\"choice\":");
    write_string(out, choice, JsonStyle::Compact);
    out.push_str(&format!(",\"latency_ms\":{}}}", milliseconds(latency)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_given_order_comes_first_and_a_seed_repeats_its_orders() {
        let some = orders(5, 8, 7);
        assert_eq!(some[0], [0, 1, 2, 3, 4]);
        assert_eq!(some, orders(5, 8, 7));
        assert_ne!(some, orders(5, 8, 8));
        for order in &some {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4]);
        }
        assert_eq!(orders(1, 3, 0), [[0], [0], [0]]);
    }

    #[test]
    fn names_what_is_wrong() {
        let inner = r#""request":{"state":1,"questions":{"a":{"type":"choice","criteria":{"x":null}},"n":{"type":"noul"}}}"#;
        let cases = [
            ("[]".to_owned(), "model_attributes_type"),
            ("{".to_owned(), "json_invalid"),
            (r#"{"question":"a"}"#.to_owned(), "\"body\",\"request\"],\"msg\":\"Field required"),
            (format!("{{{inner}}}"), "\"body\",\"question\"],\"msg\":\"Field required"),
            (format!(r#"{{{inner},"question":1}}"#), "string_type"),
            (format!(r#"{{{inner},"question":"n"}}"#), "must name a choice"),
            (format!(r#"{{{inner},"question":"b"}}"#), "must name a choice"),
            (format!(r#"{{{inner},"question":"a","n_perm":0}}"#), "between 1 and 64"),
            (format!(r#"{{{inner},"question":"a","n_perm":65}}"#), "between 1 and 64"),
            (format!(r#"{{{inner},"question":"a","n_perm":1.5}}"#), "int_type"),
            (format!(r#"{{{inner},"question":"a","n_perm":true}}"#), "int_type"),
            (format!(r#"{{{inner},"question":"a","seed":"x"}}"#), "int_type"),
            (format!(r#"{{{inner},"question":"a","seed":1e300}}"#), "int_type"),
            (r#"{"question":"a","request":{"state":1}}"#.to_owned(), "\"body\",\"request\",\"questions\""),
        ];
        for (body, expected) in cases {
            let error = parse(body.as_bytes()).unwrap_err();
            assert!(error.body().contains(expected), "{body}: {}", error.body());
            assert_eq!(error.row().status.as_u16(), 422);
        }
        let good = format!(r#"{{{inner},"question":"a","n_perm":2.0,"seed":-1}}"#);
        assert_eq!(parse(good.as_bytes()).unwrap().questions.len(), 2);
    }

    #[test]
    fn the_answer_says_how_much_the_order_matters() {
        let run = |choice: &str, options: &[(&str, f64)]| Answer::Choice {
            choice: choice.to_owned(),
            confidence: 0.0,
            probabilities: options.iter().map(|(name, p)| ((*name).to_owned(), *p)).collect(),
        };
        let answers: Answers = vec![
            ("0".to_owned(), run("a", &[("a", 0.75), ("b", 0.25)])),
            ("1".to_owned(), run("b", &[("b", 0.625), ("a", 0.375)])),
        ];
        let text = text(&answers, &[vec![0.75, 0.25], vec![0.625, 0.375]], Duration::from_millis(2));
        assert_eq!(
            text,
            "{\"runs\":[{\"order\":[\"a\",\"b\"],\"probabilities\":{\"a\":0.75,\"b\":0.25},\"choice\":\"a\",\"latency_ms\":2.0},\
             {\"order\":[\"b\",\"a\"],\"probabilities\":{\"b\":0.625,\"a\":0.375},\"choice\":\"b\",\"latency_ms\":2.0}],\
             \"argmax_stable\":false,\"spread\":0.375}"
        );
    }
}
