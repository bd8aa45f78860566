//! Owns validation: body bytes in, a request that keeps every rule of the wire contract out, or a list of what breaks
//! them. Knows no HTTP status.

use decision::{DecisionRequest, Json, JsonError, Question, QuestionKind};
use indexmap::IndexMap;

/// The model name of a request that gives none.
pub const DEFAULT_MODEL: &str = "kev-latest";

/// Violations reported at most; a request with more is no clearer for a longer list.
const MAX_VIOLATIONS: usize = 32;
/// Options or levels of a question at most.
const MAX_OPTIONS: usize = 255;

/// Why a request was refused before anything was queued. Always the caller's to fix.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// The body is Unicode text but not JSON.
    #[error("body is not JSON: {message} at character {position}")]
    NotJson {
        /// What the reader expected.
        message: &'static str,
        /// Offset in characters.
        position: usize,
    },
    /// The body cannot be read at all: no Unicode encoding, nested too deep, or an integer too long.
    #[error("{0}")]
    Unparsable(JsonError),
    /// The body is JSON and breaks rules of the schema.
    #[error("{}", violations(.0))]
    Violations(Vec<Violation>),
    /// A text is longer than this deployment accepts.
    #[error("{what} is {tokens} tokens, over the limit of {limit}: shorten it or split the request")]
    TooLong {
        /// Which text: "state", or the question by its place.
        what: String,
        /// Tokens found.
        tokens: usize,
        /// Tokens accepted.
        limit: usize,
    },
    /// A text is so long that it was not tokenised.
    #[error("{what} renders to more than 64 MiB of text: shorten it or split the request")]
    TooLarge {
        /// Which text.
        what: String,
    },
    /// The tokenizer failed on a text.
    #[error("{what} cannot be tokenised: {reason}")]
    Tokenizer {
        /// Which text.
        what: String,
        /// The engine's reason.
        reason: String,
    },
}

/// One broken rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Violation {
    /// Machine-readable kind, the names FastAPI clients know: `missing`, `string_type`, ….
    pub kind: &'static str,
    /// Where: keys and indices after `body`.
    pub path: Vec<PathItem>,
    /// For people.
    pub message: String,
    /// What was there, if it is short.
    pub input: Option<Json>,
}

/// A step of a path.
#[derive(Clone, Debug, PartialEq)]
pub enum PathItem {
    /// A key.
    Key(String),
    /// An index.
    Index(usize),
}

/// The first violation with its place, and how many more there are.
fn violations(all: &[Violation]) -> String {
    let Some(first) = all.first() else { return String::new() };
    let mut text = String::from("body");
    for item in &first.path {
        match item {
            PathItem::Key(key) => text.push_str(&format!(".{}", key.escape_debug())),
            PathItem::Index(index) => text.push_str(&format!("[{index}]")),
        }
    }
    text.push_str(&format!(": {}", first.message));
    if all.len() > 1 {
        text.push_str(&format!(" (and {} more)", all.len() - 1));
    }
    text
}

impl From<&str> for PathItem {
    fn from(key: &str) -> Self {
        // Ids are the caller's text: echoed, but never at any length.
        Self::Key(if key.len() <= 200 {
            key.to_owned()
        } else {
            key.chars().take(200).chain(['…']).collect()
        })
    }
}

/// Reads and validates a body.
///
/// # Errors
/// [`RequestError::NotJson`], [`RequestError::Unparsable`] or [`RequestError::Violations`].
pub fn parse_request(body: &[u8]) -> Result<DecisionRequest, RequestError> {
    validate_request(parse_json(body)?)
}

/// Reads a body as JSON, whatever it means.
///
/// # Errors
/// [`RequestError::NotJson`] or [`RequestError::Unparsable`]; [`RequestError::Violations`] for no body at all.
pub fn parse_json(body: &[u8]) -> Result<Json, RequestError> {
    if body.is_empty() {
        return Err(RequestError::Violations(vec![violation(
            "missing",
            &[],
            "Field required",
            Some(&Json::Null),
        )]));
    }
    decision::parse::parse(body).map_err(|error| match error {
        JsonError::Syntax { message, position } => RequestError::NotJson { message, position },
        other => RequestError::Unparsable(other),
    })
}

/// Validates a JSON value as a request.
///
/// # Errors
/// [`RequestError::Violations`] with at most 32 of them.
pub fn validate_request(json: Json) -> Result<DecisionRequest, RequestError> {
    let mut found = Found(Vec::new());
    let Json::Object(mut fields) = json else {
        found.add(
            "model_attributes_type",
            &[],
            "Input should be a valid dictionary or object to extract fields from",
            Some(&json),
        );
        return Err(RequestError::Violations(found.0));
    };
    if fields.contains_key("assets") {
        found.add(
            "unsupported",
            &["assets".into()],
            "Images are not supported: this worker reads text only",
            None,
        );
    }
    let state = fields.swap_remove("state").unwrap_or_else(|| {
        found.add("missing", &["state".into()], "Field required", None);
        Json::Null
    });
    let model = match fields.swap_remove("model") {
        None => DEFAULT_MODEL.to_owned(),
        Some(Json::String(name)) => name,
        Some(other) => {
            found.add("string_type", &["model".into()], "Input should be a valid string", Some(&other));
            String::new()
        }
    };
    let questions = match fields.swap_remove("questions") {
        None => {
            found.add("missing", &["questions".into()], "Field required", None);
            Vec::new()
        }
        Some(Json::Object(entries)) if entries.is_empty() => {
            let message = "Dictionary should have at least 1 item after validation, not 0";
            found.add("too_short", &["questions".into()], message, Some(&Json::Object(entries)));
            Vec::new()
        }
        Some(Json::Object(entries)) => entries
            .into_iter()
            .filter_map(|(id, question)| validate_question(id, question, &mut found))
            .collect(),
        Some(other) => {
            found.add("dict_type", &["questions".into()], "Input should be a valid dictionary", Some(&other));
            Vec::new()
        }
    };
    if found.0.is_empty() {
        Ok(DecisionRequest { model, state, questions })
    } else {
        Err(RequestError::Violations(found.0))
    }
}

fn validate_question(id: String, question: Json, found: &mut Found) -> Option<Question> {
    let at = |more: &[&str]| -> Vec<PathItem> {
        ["questions", id.as_str()].iter().chain(more).map(|key| PathItem::from(*key)).collect()
    };
    let Json::Object(mut fields) = question else {
        let message = "Input should be a valid dictionary or object to extract fields from";
        found.add("model_attributes_type", &at(&[]), message, Some(&question));
        return None;
    };
    let instructions = fields.swap_remove("instructions").unwrap_or(Json::Null);
    let criteria = fields.swap_remove("criteria");
    let kind = match fields.swap_remove("type") {
        None => {
            found.add(
                "union_tag_not_found",
                &at(&[]),
                "Unable to extract tag using discriminator 'type'",
                None,
            );
            return None;
        }
        Some(Json::String(name)) => match name.as_str() {
            "noul" => noul(criteria, &at(&["noul", "criteria"]), found),
            "choice" => choice(criteria, &at(&["choice", "criteria"]), found),
            "score" => score(criteria, &at(&["score", "criteria"]), found),
            _ => {
                let message = "Input tag does not match any of the expected tags: 'noul', 'choice', 'score'";
                found.add("union_tag_invalid", &at(&[]), message, Some(&Json::String(name)));
                None
            }
        },
        Some(other) => {
            let message = "Input tag should be one of the strings 'noul', 'choice', 'score'";
            found.add("union_tag_invalid", &at(&[]), message, Some(&other));
            None
        }
    }?;
    Some(Question { id, instructions, kind })
}

fn noul(criteria: Option<Json>, path: &[PathItem], found: &mut Found) -> Option<QuestionKind> {
    match criteria {
        None | Some(Json::Null) => Some(QuestionKind::Noul { no: Json::Null, yes: Json::Null }),
        Some(Json::Object(mut sides)) => {
            let mut side = |key: &str| sides.swap_remove(key).unwrap_or(Json::Null);
            Some(QuestionKind::Noul { no: side("false"), yes: side("true") })
        }
        Some(other) => {
            found.add(
                "dict_type",
                path,
                "Input should be a valid dictionary with the keys 'true' and 'false'",
                Some(&other),
            );
            None
        }
    }
}

fn choice(criteria: Option<Json>, path: &[PathItem], found: &mut Found) -> Option<QuestionKind> {
    let options: IndexMap<String, Json> = match criteria {
        Some(Json::Object(options)) => options,
        None => {
            found.add("missing", path, "Field required", None);
            return None;
        }
        Some(other) => {
            found.add("dict_type", path, "Input should be a valid dictionary of option names", Some(&other));
            return None;
        }
    };
    bounded(options.len(), "options", path, found)
        .then(|| QuestionKind::Choice { options: options.into_iter().collect() })
}

fn score(criteria: Option<Json>, path: &[PathItem], found: &mut Found) -> Option<QuestionKind> {
    let levels = match criteria {
        Some(Json::Array(levels)) => levels,
        None => {
            found.add("missing", path, "Field required", None);
            return None;
        }
        Some(other) => {
            found.add("list_type", path, "Input should be a valid list of levels", Some(&other));
            return None;
        }
    };
    bounded(levels.len(), "levels", path, found).then_some(QuestionKind::Score { levels })
}

fn bounded(count: usize, what: &str, path: &[PathItem], found: &mut Found) -> bool {
    if count == 0 {
        found.add("too_short", path, &format!("At least 1 of the {what} is needed, not 0"), None);
    } else if count > MAX_OPTIONS {
        found.add("too_long", path, &format!("At most {MAX_OPTIONS} {what} are possible, not {count}"), None);
    }
    (1..=MAX_OPTIONS).contains(&count)
}

struct Found(Vec<Violation>);

impl Found {
    fn add(&mut self, kind: &'static str, path: &[PathItem], message: &str, input: Option<&Json>) {
        if self.0.len() < MAX_VIOLATIONS {
            self.0.push(violation(kind, path, message, input));
        }
    }
}

fn violation(kind: &'static str, path: &[PathItem], message: &str, input: Option<&Json>) -> Violation {
    let short = |value: &&Json| match value {
        Json::Null | Json::Bool(_) => true,
        Json::Number(decision::Number::Integer(digits)) => digits.len() <= 100,
        Json::Number(decision::Number::Float(value)) => value.is_finite(),
        Json::String(text) => text.len() <= 100,
        Json::Array(items) => items.is_empty(),
        Json::Object(map) => map.is_empty(),
    };
    Violation { kind, path: path.to_vec(), message: message.to_owned(), input: input.filter(short).cloned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(body: &str) -> Vec<(&'static str, String)> {
        let Err(RequestError::Violations(list)) = parse_request(body.as_bytes()) else {
            panic!("{body} was accepted")
        };
        list.into_iter()
            .map(|violation| {
                let path: Vec<String> = violation
                    .path
                    .iter()
                    .map(|item| match item {
                        PathItem::Key(key) => key.clone(),
                        PathItem::Index(index) => index.to_string(),
                    })
                    .collect();
                (violation.kind, path.join("."))
            })
            .collect()
    }

    #[test]
    fn names_what_is_wrong_and_where() {
        let cases: [(&str, &[(&str, &str)]); 14] = [
            ("", &[("missing", "")]),
            ("[1]", &[("model_attributes_type", "")]),
            ("{}", &[("missing", "state"), ("missing", "questions")]),
            (r#"{"state":1,"questions":{}}"#, &[("too_short", "questions")]),
            (r#"{"state":1,"questions":[]}"#, &[("dict_type", "questions")]),
            (r#"{"state":1,"model":3,"questions":{"a":{"type":"noul"}}}"#, &[("string_type", "model")]),
            (r#"{"state":1,"questions":{"a":{}}}"#, &[("union_tag_not_found", "questions.a")]),
            (
                r#"{"state":1,"questions":{"a":{"type":"bool"},"b":[]}}"#,
                &[("union_tag_invalid", "questions.a"), ("model_attributes_type", "questions.b")],
            ),
            (
                r#"{"state":1,"questions":{"a":{"type":"choice"}}}"#,
                &[("missing", "questions.a.choice.criteria")],
            ),
            (
                r#"{"state":1,"questions":{"a":{"type":"choice","criteria":{}}}}"#,
                &[("too_short", "questions.a.choice.criteria")],
            ),
            (
                r#"{"state":1,"questions":{"a":{"type":"score","criteria":{}}}}"#,
                &[("list_type", "questions.a.score.criteria")],
            ),
            (
                r#"{"state":1,"questions":{"a":{"type":"score","criteria":[]}}}"#,
                &[("too_short", "questions.a.score.criteria")],
            ),
            (
                r#"{"state":1,"questions":{"a":{"type":"noul","criteria":"x"}}}"#,
                &[("dict_type", "questions.a.noul.criteria")],
            ),
            (r#"{"state":1,"assets":{},"questions":{"a":{"type":"noul"}}}"#, &[("unsupported", "assets")]),
        ];
        for (body, expected) in cases {
            let found = kinds(body);
            let found: Vec<(&str, &str)> = found.iter().map(|(kind, path)| (*kind, path.as_str())).collect();
            assert_eq!(found, expected, "{body}");
        }
    }

    #[test]
    fn accepts_what_the_reference_accepts() {
        for body in [
            r#"{"state":null,"questions":{"":{"type":"noul"}}}"#,
            r#"{"state":[],"questions":{"a":{"type":"choice","criteria":{"":null},"instructions":7}},"seed":1}"#,
            r#"{"state":{},"questions":{"a":{"type":"score","criteria":[null],"extra":1}}}"#,
            r#"{"state":"","questions":{"a":{"type":"noul","criteria":{"true":"x","other":1}}}}"#,
        ] {
            assert_eq!(parse_request(body.as_bytes()).unwrap().model, DEFAULT_MODEL);
        }
    }

    #[test]
    fn options_are_bounded_and_the_list_of_violations_too() {
        let choice = |count: usize| {
            let options: Vec<String> = (0..count).map(|n| format!("\"{n}\":null")).collect();
            format!(
                r#"{{"state":1,"questions":{{"a":{{"type":"choice","criteria":{{{}}}}}}}}}"#,
                options.join(",")
            )
        };
        assert!(parse_request(choice(255).as_bytes()).is_ok());
        assert_eq!(kinds(&choice(256)), [("too_long", "questions.a.choice.criteria".to_owned())]);
        let many: Vec<String> = (0..5000).map(|n| format!("\"{n}\":{{}}")).collect();
        assert_eq!(
            kinds(&format!(r#"{{"state":1,"questions":{{{}}}}}"#, many.join(","))).len(),
            MAX_VIOLATIONS
        );
    }
}
