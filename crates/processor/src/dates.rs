//! Owns the opt-in date facts: how far apart the absolute dates of a state lie, added to the state as text.

use decision::Json;

use crate::render::{TooLong, render};

const KEY: &str = "date_facts";
const PARAGRAPH: &str = "\n\ndate_facts: ";
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// Dates considered; pairs grow with the square.
const MAX_DATES: usize = 32;

/// The state with facts about its dates; an earlier annotation is replaced and its dates do not count.
pub(crate) fn annotate(state: &Json) -> Result<Json, TooLong> {
    let plain = without_facts(state);
    let Some(facts) = facts(&render(&plain)?) else { return Ok(state.clone()) };
    Ok(match plain {
        Json::String(text) => Json::String(text + PARAGRAPH + &facts),
        Json::Array(mut items) => {
            items.push(Json::Object([(KEY.to_owned(), Json::String(facts))].into_iter().collect()));
            Json::Array(items)
        }
        Json::Object(map) => {
            // An annotation that was there keeps its place.
            let place = match state {
                Json::Object(before) => before.get_index_of(KEY),
                _ => None,
            };
            let mut map = map;
            match place {
                Some(place) => _ = map.shift_insert(place, KEY.to_owned(), Json::String(facts)),
                None => _ = map.insert(KEY.to_owned(), Json::String(facts)),
            }
            Json::Object(map)
        }
        other => other,
    })
}

fn without_facts(state: &Json) -> Json {
    match state {
        Json::String(text) => match text.rfind(PARAGRAPH) {
            Some(at) if !text[at + PARAGRAPH.len()..].contains('\n') => Json::String(text[..at].to_owned()),
            _ => state.clone(),
        },
        Json::Array(items) => match items.split_last() {
            Some((Json::Object(last), rest)) if last.len() == 1 && last.contains_key(KEY) => {
                Json::Array(rest.to_vec())
            }
            _ => state.clone(),
        },
        Json::Object(map) => {
            let mut map = map.clone();
            map.shift_remove(KEY);
            Json::Object(map)
        }
        other => other.clone(),
    }
}

fn facts(text: &str) -> Option<String> {
    let mut dates: Vec<(&str, i64)> = Vec::new();
    for (at, _) in text.char_indices() {
        if dates.len() == MAX_DATES {
            break;
        }
        if at > 0 && text[..at].chars().next_back().is_some_and(is_word) {
            continue;
        }
        if let Some((length, day)) = iso_date(&text[at..]).or_else(|| english_date(&text[at..])) {
            let spelling = &text[at..at + length];
            if !dates.iter().any(|(known, _)| *known == spelling) {
                dates.push((spelling, day));
            }
        }
    }
    let mut sentences = Vec::new();
    for (first, (earlier, from)) in dates.iter().enumerate() {
        for (later, to) in &dates[first + 1..] {
            sentences.push(match to - from {
                0 => format!("{later} is the same day as {earlier}."),
                days => {
                    let unit = if days.abs() == 1 { "day" } else { "days" };
                    let side = if days > 0 { "after" } else { "before" };
                    format!("{later} is {} {unit} {side} {earlier}.", days.abs())
                }
            });
        }
    }
    (!sentences.is_empty()).then(|| sentences.join(" "))
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn ends_word(text: &str, at: usize) -> bool {
    !text[at..].chars().next().is_some_and(is_word)
}

fn digits(text: &str, count: usize) -> Option<i64> {
    let part = text.get(..count).filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()))?;
    part.parse().ok()
}

/// `YYYY-MM-DD`, and how long it is.
fn iso_date(text: &str) -> Option<(usize, i64)> {
    let year = digits(text, 4)?;
    let month = digits(text.get(4..)?.strip_prefix('-')?, 2)?;
    let day = digits(text.get(7..)?.strip_prefix('-')?, 2)?;
    let number = day_number(year, month, day)?;
    ends_word(text, 10).then_some((10, number))
}

/// `Month D, YYYY`, and how long it is.
fn english_date(text: &str) -> Option<(usize, i64)> {
    let index = MONTHS.iter().position(|month| text.starts_with(month))?;
    let rest = text[MONTHS[index].len()..].strip_prefix(' ')?;
    let width = rest.bytes().take_while(u8::is_ascii_digit).count();
    if !(1..=2).contains(&width) {
        return None;
    }
    let day = digits(rest, width)?;
    let year_text = rest[width..].strip_prefix(", ")?;
    let number = day_number(digits(year_text, 4)?, index as i64 + 1, day)?;
    let length = text.len() - year_text.len() + 4;
    ends_word(text, length).then_some((length, number))
}

/// Days since an epoch of the proleptic Gregorian calendar; `None` for a date that does not exist.
fn day_number(year: i64, month: i64, day: i64) -> Option<i64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let longest = *lengths.get(usize::try_from(month).ok()?.checked_sub(1)?)?;
    if year < 1 || !(1..=longest).contains(&day) {
        return None;
    }
    let before: i64 = lengths[..month as usize - 1].iter().sum();
    let years = year - 1;
    Some(years * 365 + years / 4 - years / 100 + years / 400 + before + day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotated(body: &str) -> String {
        render(&annotate(&decision::parse::parse(body.as_bytes()).unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn states_how_far_dates_lie_apart() {
        let cases = [
            (
                "\"From July 22, 2026 until 2026-08-03.\"",
                "From July 22, 2026 until 2026-08-03.\n\ndate_facts: 2026-08-03 is 12 days after July 22, 2026.",
            ),
            (
                "\"2026-03-01, 2024-02-29\"",
                "2026-03-01, 2024-02-29\n\ndate_facts: 2024-02-29 is 731 days before 2026-03-01.",
            ),
            (
                "\"2026-07-22 or July 22, 2026\"",
                "2026-07-22 or July 22, 2026\n\ndate_facts: July 22, 2026 is the same day as 2026-07-22.",
            ),
            ("\"2026-02-30 and 2026-01-01\"", "2026-02-30 and 2026-01-01"),
            ("\"2026-01-01T10 x2026-01-02 2026-01-03\"", "2026-01-01T10 x2026-01-02 2026-01-03"),
            (
                "[\"2026-07-22\",\"2026-07-23\"]",
                "- 2026-07-22\n- 2026-07-23\n- date_facts: 2026-07-23 is 1 day after 2026-07-22.",
            ),
            ("7", "7"),
        ];
        for (body, text) in cases {
            assert_eq!(annotated(body), text, "{body}");
        }
    }

    #[test]
    fn an_earlier_annotation_is_replaced_and_does_not_count() {
        let bodies = [
            "\"2026-07-22 and 2026-08-03\"",
            "[\"2026-07-22\",\"2026-08-03\"]",
            "{\"a\":\"2026-07-22\",\"date_facts\":\"2020-01-01\",\"b\":\"2026-08-03\"}",
        ];
        for body in bodies {
            let once = annotate(&decision::parse::parse(body.as_bytes()).unwrap()).unwrap();
            assert_eq!(annotate(&once).unwrap(), once, "{body}");
            assert!(!render(&once).unwrap().contains("2020"), "{body}");
        }
        assert!(annotated(bodies[2]).starts_with("a: 2026-07-22\ndate_facts: 2026-08-03 is 12"));
    }
}
