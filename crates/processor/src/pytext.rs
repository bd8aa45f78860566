//! Owns the text that Python gives numbers and JSON values: what the model reads of a number, and the two JSON forms of
//! answers (the response body's, and the one whose tokens are counted).

use std::fmt::Write;

use decision::{Answer, Answers, Json, Number};

/// `str(float)`: the shortest digits that round-trip, an exponent below 1e-4 and from 1e16 on.
pub fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    // `{:e}` gives the shortest round-trip digits as `d.ddde±x`.
    let text = format!("{value:e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or(("", mantissa), |rest| ("-", rest));
    let digits: String = mantissa.chars().filter(|c| *c != '.').collect();
    if !(-4..16).contains(&exponent) {
        let (first, rest) = digits.split_at(1);
        let point = if rest.is_empty() { "" } else { "." };
        let direction = if exponent < 0 { '-' } else { '+' };
        return format!("{sign}{first}{point}{rest}e{direction}{:02}", exponent.unsigned_abs());
    }
    if exponent < 0 {
        return format!("{sign}0.{}{digits}", "0".repeat(exponent.unsigned_abs() as usize - 1));
    }
    let whole = exponent as usize + 1;
    if digits.len() <= whole {
        return format!("{sign}{digits}{}.0", "0".repeat(whole - digits.len()));
    }
    format!("{sign}{}.{}", &digits[..whole], &digits[whole..])
}

/// `str(number)`.
pub fn number(value: &Number) -> String {
    match value {
        Number::Integer(digits) => digits.clone(),
        Number::Float(value) => float(*value),
    }
}

/// `round(value, 4)`: the exact binary value rounded once, ties to even.
pub fn round4(value: f64) -> f64 {
    // Formatting rounds the exact value correctly; multiplying by 10,000 first would round twice.
    format!("{value:.4}").parse().unwrap_or(value)
}

/// Python 3.12's `sum()` of floats, which carries a Neumaier compensation.
pub fn sum(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut total, mut lost) = (0.0f64, 0.0f64);
    for value in values {
        let next = total + value;
        lost += if total.abs() >= value.abs() { (total - next) + value } else { (value - next) + total };
        total = next;
    }
    if lost != 0.0 && lost.is_finite() { total + lost } else { total }
}

/// How a JSON text is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonStyle {
    /// `separators=(",", ":"), ensure_ascii=False`: a response body.
    Compact,
    /// `json.dumps` with its defaults: `", "`, `": "`, everything but printable ASCII escaped, DEL (0x7f) too.
    Default,
}

impl JsonStyle {
    fn comma(self) -> &'static str {
        if self == Self::Compact { "," } else { ", " }
    }

    fn colon(self) -> &'static str {
        if self == Self::Compact { ":" } else { ": " }
    }
}

/// Appends a JSON string.
pub fn write_string(out: &mut String, text: &str, style: JsonStyle) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (style == JsonStyle::Default && c > '~') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Appends any JSON value; numbers as Python prints them.
pub fn write_json(out: &mut String, value: &Json, style: JsonStyle) {
    match value {
        Json::Null => out.push_str("null"),
        Json::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Json::Number(value) => match value {
            Number::Float(value) if value.is_nan() => out.push_str("NaN"),
            Number::Float(value) if value.is_infinite() => {
                out.push_str(if *value > 0.0 { "Infinity" } else { "-Infinity" });
            }
            other => out.push_str(&number(other)),
        },
        Json::String(text) => write_string(out, text, style),
        Json::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push_str(style.comma());
                }
                write_json(out, item, style);
            }
            out.push(']');
        }
        Json::Object(map) => {
            out.push('{');
            for (index, (key, item)) in map.iter().enumerate() {
                if index > 0 {
                    out.push_str(style.comma());
                }
                write_string(out, key, style);
                out.push_str(style.colon());
                write_json(out, item, style);
            }
            out.push('}');
        }
    }
}

/// The `answers` object, keys in the order of the wire contract.
pub fn answers(answers: &Answers, style: JsonStyle) -> String {
    let mut out = String::from("{");
    for (index, (id, answer)) in answers.iter().enumerate() {
        if index > 0 {
            out.push_str(style.comma());
        }
        write_string(&mut out, id, style);
        out.push_str(style.colon());
        write_answer(&mut out, answer, style);
    }
    out.push('}');
    out
}

fn write_answer(out: &mut String, answer: &Answer, style: JsonStyle) {
    let (comma, colon) = (style.comma(), style.colon());
    match answer {
        Answer::Noul { noul } => {
            let _ = write!(out, "{{\"type\"{colon}\"noul\"{comma}\"noul\"{colon}{}}}", float(*noul));
        }
        Answer::Choice { choice, confidence, probabilities } => {
            let _ = write!(out, "{{\"type\"{colon}\"choice\"{comma}\"choice\"{colon}");
            write_string(out, choice, style);
            let _ = write!(
                out,
                "{comma}\"confidence\"{colon}{}{comma}\"probabilities\"{colon}",
                float(*confidence)
            );
            let entries = probabilities.iter().map(|(name, p)| (name.as_str(), *p));
            write_entries(out, entries, style, |out, p| out.push_str(&float(p)));
            out.push('}');
        }
        Answer::Score { score, legend, probabilities, confidence } => {
            let keys: Vec<String> = (0..legend.len()).map(|level| level.to_string()).collect();
            let _ = write!(
                out,
                "{{\"type\"{colon}\"score\"{comma}\"score\"{colon}{}{comma}\"legend\"{colon}",
                float(*score)
            );
            let entries = keys.iter().map(String::as_str).zip(legend);
            write_entries(out, entries, style, |out, text| write_string(out, text, style));
            let _ = write!(out, "{comma}\"probabilities\"{colon}");
            let entries = keys.iter().map(String::as_str).zip(probabilities.iter().copied());
            write_entries(out, entries, style, |out, p| out.push_str(&float(p)));
            let _ = write!(out, "{comma}\"confidence\"{colon}{}}}", float(*confidence));
        }
    }
}

fn write_entries<'a, T>(
    out: &mut String,
    entries: impl Iterator<Item = (&'a str, T)>,
    style: JsonStyle,
    mut write_value: impl FnMut(&mut String, T),
) {
    out.push('{');
    for (index, (key, value)) in entries.enumerate() {
        if index > 0 {
            out.push_str(style.comma());
        }
        write_string(out, key, style);
        out.push_str(style.colon());
        write_value(out, value);
    }
    out.push('}');
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Left: what CPython prints.
    #[test]
    fn floats_print_as_in_python() {
        let cases = [
            ("0.0", 0.0),
            ("-0.0", -0.0),
            ("1.0", 1.0),
            ("0.0001", 1e-4),
            ("1e-05", 1e-5),
            ("1.5e-07", 1.5e-7),
            ("1000000000000000.0", 1e15),
            ("1e+16", 1e16),
            ("1.2345678901234568e+16", 12345678901234568.0),
            ("9999999999999998.0", 9999999999999998.0),
            ("5e-324", 5e-324),
            ("1.7976931348623157e+308", f64::MAX),
            ("1e+100", 1e100),
            ("0.1", 0.1),
            ("12345678.9", 12345678.9),
            ("-1.5e+300", -1.5e300),
            ("nan", f64::NAN),
            ("inf", f64::INFINITY),
            ("-inf", f64::NEG_INFINITY),
            ("123.456", 123.456),
        ];
        for (text, value) in cases {
            assert_eq!(float(value), text);
        }
    }

    #[test]
    fn rounds_the_binary_value_once() {
        // Exact ties go to even; 0.00005 is below its decimal spelling's tie in binary.
        for (value, rounded) in
            [(0.03125, 0.0312), (0.93755, 0.9375), (0.00015, 0.0001), (0.99995, 1.0), (1.0, 1.0)]
        {
            assert_eq!(round4(value), rounded, "{value}");
        }
    }

    #[test]
    fn sums_with_compensation() {
        assert_eq!(sum([1.0, 1e100, 1.0, -1e100]), 2.0);
        assert_eq!(sum(std::iter::repeat_n(0.1, 10)), 1.0);
    }

    #[test]
    fn strings_are_escaped_as_in_python() {
        let text = "\"\\\n\u{1}\u{7f}\u{e9}\u{1f3af}/";
        let mut compact = String::new();
        write_string(&mut compact, text, JsonStyle::Compact);
        assert_eq!(compact, "\"\\\"\\\\\\n\\u0001\u{7f}\u{e9}\u{1f3af}/\"");
        let mut default = String::new();
        write_string(&mut default, text, JsonStyle::Default);
        assert_eq!(default, "\"\\\"\\\\\\n\\u0001\\u007f\\u00e9\\ud83c\\udfaf/\"");
    }

    proptest::proptest! {
        #[test]
        fn floats_round_trip(value in proptest::num::f64::ANY) {
            let text = float(value);
            if value.is_finite() {
                proptest::prop_assert_eq!(text.parse::<f64>().unwrap().to_bits(), value.to_bits());
                proptest::prop_assert!(text.contains('.') || text.contains('e'));
            }
        }

        #[test]
        fn json_round_trips(text in ".*") {
            for style in [JsonStyle::Compact, JsonStyle::Default] {
                let mut out = String::new();
                write_string(&mut out, &text, style);
                proptest::prop_assert_eq!(decision::parse::parse(out.as_bytes()), Ok(Json::String(text.clone())));
            }
        }
    }
}
