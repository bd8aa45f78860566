//! Owns the JSON reader: what Python's `json` accepts, refused with the same words at the same character, in bounded
//! depth. Knows nothing of requests.

use indexmap::IndexMap;

use crate::{Json, Number};

/// Deepest nesting accepted. The reference's own limit lies between 300 and 900, depending on its call stack.
pub const MAX_DEPTH: usize = 512;

/// Most digits of an integer: the limit of Python's `int`.
pub const MAX_INTEGER_DIGITS: usize = 4300;

/// Why a body is not a JSON value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// The text breaks the grammar.
    #[error("{message}: character {position}")]
    Syntax {
        /// Python's wording.
        message: &'static str,
        /// Offset in characters.
        position: usize,
    },
    /// The bytes are in no Unicode encoding.
    #[error("body is not valid Unicode text")]
    Encoding,
    /// Arrays and objects nest too deep.
    #[error("body nests deeper than {MAX_DEPTH} levels")]
    Depth,
    /// An integer is too long.
    #[error("body has an integer of more than {MAX_INTEGER_DIGITS} digits")]
    IntegerDigits,
}

/// Reads one JSON value from a body in UTF-8, UTF-16 or UTF-32, with or without a byte order mark.
///
/// `NaN`, `Infinity` and `-Infinity` are numbers, as in the reference. An escape that leaves a lone surrogate is
/// refused: the reference accepts it and fails later.
///
/// # Errors
/// [`JsonError`].
pub fn parse(body: &[u8]) -> Result<Json, JsonError> {
    let text = decode(body)?;
    let mut reader = Reader { text: &text, bytes: text.as_bytes(), at: 0 };
    reader.space();
    let value = reader.value(0)?;
    reader.space();
    if reader.at != reader.bytes.len() {
        return Err(reader.syntax("Extra data", reader.at));
    }
    Ok(value)
}

/// Python's detection: a byte order mark, else where the zero bytes of the first two characters lie.
fn decode(body: &[u8]) -> Result<std::borrow::Cow<'_, str>, JsonError> {
    let zero = |index: usize| body.get(index) == Some(&0);
    match body {
        [0xff, 0xfe, 0, 0, rest @ ..] => utf32(rest, u32::from_le_bytes),
        [0, 0, 0xfe, 0xff, rest @ ..] => utf32(rest, u32::from_be_bytes),
        [0xff, 0xfe, rest @ ..] => utf16(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => utf16(rest, u16::from_be_bytes),
        [0xef, 0xbb, 0xbf, rest @ ..] => utf8(rest),
        [_, _, _, _, ..] if zero(0) => {
            if zero(1) {
                utf32(body, u32::from_be_bytes)
            } else {
                utf16(body, u16::from_be_bytes)
            }
        }
        [_, _, _, _, ..] if zero(1) => {
            if !zero(2) || !zero(3) {
                utf16(body, u16::from_le_bytes)
            } else {
                utf32(body, u32::from_le_bytes)
            }
        }
        [0, _] => utf16(body, u16::from_be_bytes),
        [_, 0] => utf16(body, u16::from_le_bytes),
        _ => utf8(body),
    }
}

fn utf8(bytes: &[u8]) -> Result<std::borrow::Cow<'_, str>, JsonError> {
    std::str::from_utf8(bytes).map(Into::into).map_err(|_| JsonError::Encoding)
}

fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<std::borrow::Cow<'_, str>, JsonError> {
    let (units, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(JsonError::Encoding);
    }
    let text: Result<String, _> = char::decode_utf16(units.iter().map(|pair| unit(*pair))).collect();
    text.map(Into::into).map_err(|_| JsonError::Encoding)
}

fn utf32(bytes: &[u8], unit: fn([u8; 4]) -> u32) -> Result<std::borrow::Cow<'_, str>, JsonError> {
    let (units, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(JsonError::Encoding);
    }
    let text: Option<String> = units.iter().map(|four| char::from_u32(unit(*four))).collect();
    text.map(Into::into).ok_or(JsonError::Encoding)
}

struct Reader<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn syntax(&self, message: &'static str, byte: usize) -> JsonError {
        let position = self.text.get(..byte).map_or(0, |before| before.chars().count());
        JsonError::Syntax { message, position }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn literal(&mut self, word: &str) -> bool {
        let found = self.bytes[self.at..].starts_with(word.as_bytes());
        if found {
            self.at += word.len();
        }
        found
    }

    fn value(&mut self, depth: usize) -> Result<Json, JsonError> {
        match self.peek() {
            Some(b'"') => self.string().map(Json::String),
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'n') if self.literal("null") => Ok(Json::Null),
            Some(b't') if self.literal("true") => Ok(Json::Bool(true)),
            Some(b'f') if self.literal("false") => Ok(Json::Bool(false)),
            Some(b'N') if self.literal("NaN") => Ok(Json::Number(Number::Float(f64::NAN))),
            Some(b'I') if self.literal("Infinity") => Ok(Json::Number(Number::Float(f64::INFINITY))),
            Some(b'-') if self.literal("-Infinity") => Ok(Json::Number(Number::Float(f64::NEG_INFINITY))),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => Err(self.syntax("Expecting value", self.at)),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, JsonError> {
        if depth == MAX_DEPTH {
            return Err(JsonError::Depth);
        }
        self.at += 1;
        self.space();
        let mut map = IndexMap::new();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Json::Object(map));
        }
        loop {
            if self.peek() != Some(b'"') {
                return Err(self.syntax("Expecting property name enclosed in double quotes", self.at));
            }
            let key = self.string()?;
            self.space();
            if self.peek() != Some(b':') {
                return Err(self.syntax("Expecting ':' delimiter", self.at));
            }
            self.at += 1;
            self.space();
            let value = self.value(depth + 1)?;
            // Inserting again keeps the first place and takes the last value.
            map.insert(key, value);
            self.space();
            match self.peek() {
                Some(b'}') => break,
                Some(b',') => self.at += 1,
                _ => return Err(self.syntax("Expecting ',' delimiter", self.at)),
            }
            self.space();
        }
        self.at += 1;
        Ok(Json::Object(map))
    }

    fn array(&mut self, depth: usize) -> Result<Json, JsonError> {
        if depth == MAX_DEPTH {
            return Err(JsonError::Depth);
        }
        self.at += 1;
        self.space();
        let mut items = Vec::new();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Json::Array(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            match self.peek() {
                Some(b']') => break,
                Some(b',') => self.at += 1,
                _ => return Err(self.syntax("Expecting ',' delimiter", self.at)),
            }
            self.space();
        }
        self.at += 1;
        Ok(Json::Array(items))
    }

    fn number(&mut self) -> Result<Json, JsonError> {
        let start = self.at;
        let negative = self.peek() == Some(b'-');
        self.at += usize::from(negative);
        let digits = self.at;
        match self.peek() {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => self.digits(),
            _ => {
                self.at = start;
                return Err(self.syntax("Expecting value", start));
            }
        }
        let integer_end = self.at;
        if self.peek() == Some(b'.') && matches!(self.bytes.get(self.at + 1), Some(b'0'..=b'9')) {
            self.at += 1;
            self.digits();
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(self.bytes.get(self.at + 1), Some(b'+' | b'-')));
            if matches!(self.bytes.get(self.at + 1 + sign), Some(b'0'..=b'9')) {
                self.at += 1 + sign;
                self.digits();
            }
        }
        let text = &self.text[start..self.at];
        if self.at > integer_end {
            // The grammar above is a subset of what `f64` parses; both round correctly and overflow to infinity.
            return text
                .parse()
                .map(|value| Json::Number(Number::Float(value)))
                .map_err(|_| self.syntax("Expecting value", start));
        }
        if integer_end - digits > MAX_INTEGER_DIGITS {
            return Err(JsonError::IntegerDigits);
        }
        Ok(Json::Number(Number::Integer(if text == "-0" { "0".to_owned() } else { text.to_owned() })))
    }

    fn digits(&mut self) {
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
    }

    fn string(&mut self) -> Result<String, JsonError> {
        let begin = self.at;
        self.at += 1;
        let mut text = String::new();
        loop {
            let from = self.at;
            while !matches!(self.peek(), None | Some(b'"' | b'\\' | 0..=0x1f)) {
                self.at += 1;
            }
            text.push_str(&self.text[from..self.at]);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(text);
                }
                Some(b'\\') => text.push(self.escape(begin)?),
                Some(_) => return Err(self.syntax("Invalid control character at", self.at)),
                None => return Err(self.syntax("Unterminated string starting at", begin)),
            }
        }
    }

    fn escape(&mut self, begin: usize) -> Result<char, JsonError> {
        let backslash = self.at;
        self.at += 2;
        let plain = match self.bytes.get(backslash + 1) {
            None => return Err(self.syntax("Unterminated string starting at", begin)),
            Some(b'u') => return self.unicode(backslash),
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(_) => return Err(self.syntax("Invalid \\escape", backslash)),
        };
        Ok(plain)
    }

    fn unicode(&mut self, backslash: usize) -> Result<char, JsonError> {
        let unit = self.hex(backslash)?;
        if let Some(character) = char::from_u32(unit) {
            return Ok(character);
        }
        if (0xd800..0xdc00).contains(&unit) && self.bytes[self.at..].starts_with(b"\\u") {
            let second = self.at;
            self.at += 2;
            let low = self.hex(second)?;
            if (0xdc00..0xe000).contains(&low) {
                let scalar = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
                return char::from_u32(scalar).ok_or(JsonError::Encoding);
            }
        }
        Err(self.syntax("Lone surrogate \\uXXXX escape", backslash))
    }

    fn hex(&mut self, backslash: usize) -> Result<u32, JsonError> {
        let digits =
            self.bytes.get(self.at..self.at + 4).filter(|four| four.iter().all(u8::is_ascii_hexdigit));
        let value = digits
            .and_then(|four| std::str::from_utf8(four).ok())
            .and_then(|four| u32::from_str_radix(four, 16).ok());
        match value {
            Some(value) => {
                self.at += 4;
                Ok(value)
            }
            None => Err(self.syntax("Invalid \\uXXXX escape", backslash + 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(body: &str) -> (&'static str, usize) {
        match parse(body.as_bytes()) {
            Err(JsonError::Syntax { message, position }) => (message, position),
            other => panic!("{body}: {other:?}"),
        }
    }

    /// Printed by CPython's `json.loads` for the same texts.
    #[test]
    fn refuses_with_pythons_words_at_pythons_place() {
        let cases = [
            ("", "Expecting value", 0),
            ("  ", "Expecting value", 2),
            ("{", "Expecting property name enclosed in double quotes", 1),
            ("{\"a\" 1}", "Expecting ':' delimiter", 5),
            ("{\"a\":1,}", "Expecting property name enclosed in double quotes", 7),
            ("{\"a\":1 \"b\"", "Expecting ',' delimiter", 7),
            ("[1,]", "Expecting value", 3),
            ("[1 2]", "Expecting ',' delimiter", 3),
            ("\"abc", "Unterminated string starting at", 0),
            ("\"abc\\", "Unterminated string starting at", 0),
            ("\"a\tb\"", "Invalid control character at", 2),
            ("\"\u{e9}\\x\"", "Invalid \\escape", 2),
            ("\"\\u12\"", "Invalid \\uXXXX escape", 2),
            ("\"\\u12g4\"", "Invalid \\uXXXX escape", 2),
            ("1.", "Extra data", 1),
            ("01", "Extra data", 1),
            ("+1", "Expecting value", 0),
            ("-", "Expecting value", 0),
            ("{}{}", "Extra data", 2),
            ("nul", "Expecting value", 0),
        ];
        for (body, message, position) in cases {
            assert_eq!(refused(body), (message, position), "{body:?}");
        }
    }

    #[test]
    fn keeps_numbers_as_python_does() {
        let cases = [
            ("-0", Number::Integer("0".to_owned())),
            ("123456789012345678901234567890", Number::Integer("123456789012345678901234567890".to_owned())),
            ("1E2", Number::Float(100.0)),
            ("-0.0", Number::Float(-0.0)),
            ("1e400", Number::Float(f64::INFINITY)),
            ("-Infinity", Number::Float(f64::NEG_INFINITY)),
        ];
        for (body, expected) in cases {
            assert_eq!(parse(body.as_bytes()), Ok(Json::Number(expected)), "{body}");
        }
        assert!(matches!(parse(b"NaN"), Ok(Json::Number(Number::Float(value))) if value.is_nan()));
        let digits = "9".repeat(MAX_INTEGER_DIGITS);
        assert!(parse(digits.as_bytes()).is_ok());
        assert_eq!(parse(format!("-{digits}9").as_bytes()), Err(JsonError::IntegerDigits));
    }

    #[test]
    fn a_repeated_key_keeps_its_place_and_takes_the_last_value() {
        let Ok(Json::Object(map)) = parse(br#"{"a":1,"b":2,"\u0061":3}"#) else { panic!() };
        let keys: Vec<&str> = map.keys().map(String::as_str).collect();
        assert_eq!(keys, ["a", "b"]);
        assert_eq!(map["a"], Json::Number(Number::Integer("3".to_owned())));
    }

    #[test]
    fn private_keys_of_other_readers_mean_nothing() {
        let body = br#"{"$serde_json::private::Number":"1"}"#;
        let Ok(Json::Object(map)) = parse(body) else { panic!() };
        assert_eq!(map["$serde_json::private::Number"], Json::String("1".to_owned()));
    }

    #[test]
    fn surrogate_pairs_join_and_lone_ones_are_refused() {
        assert_eq!(parse(br#""\ud83c\udfaf""#), Ok(Json::String("\u{1f3af}".to_owned())));
        assert_eq!(refused(r#""a\ud800""#), ("Lone surrogate \\uXXXX escape", 2));
        assert_eq!(refused(r#""\udc00""#), ("Lone surrogate \\uXXXX escape", 1));
        assert_eq!(refused(r#""\ud800\u0041""#), ("Lone surrogate \\uXXXX escape", 1));
    }

    #[test]
    fn reads_every_encoding_that_python_detects() {
        let text = "{\"a\": \"\u{e9}\u{1f3af}\"}";
        let expected = parse(text.as_bytes());
        assert!(expected.is_ok());
        let utf16: Vec<u16> = text.encode_utf16().collect();
        let mut bodies: Vec<Vec<u8>> = vec![
            [b"\xef\xbb\xbf", text.as_bytes()].concat(),
            utf16.iter().flat_map(|u| u.to_le_bytes()).collect(),
            utf16.iter().flat_map(|u| u.to_be_bytes()).collect(),
            text.chars().flat_map(|c| (c as u32).to_le_bytes()).collect(),
            text.chars().flat_map(|c| (c as u32).to_be_bytes()).collect(),
        ];
        bodies.push([&[0xff, 0xfe], bodies[1].as_slice()].concat());
        bodies.push([&[0xfe, 0xff], bodies[2].as_slice()].concat());
        bodies.push([&[0xff, 0xfe, 0, 0], bodies[3].as_slice()].concat());
        for body in bodies {
            assert_eq!(parse(&body), expected, "{body:?}");
        }
        for body in [&b"\"\xff\""[..], b"\"\xed\xa0\x80\"", b"\xff\xfe\"", b"\xff\xfe\x00\xd8\x22\x00"] {
            assert_eq!(parse(body), Err(JsonError::Encoding), "{body:?}");
        }
    }

    #[test]
    fn depth_is_bounded_on_a_small_stack() {
        let nested = |open: &str, close: &str, depth: usize| open.repeat(depth) + "1" + &close.repeat(depth);
        std::thread::Builder::new()
            .stack_size(512 * 1024)
            .spawn(move || {
                for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
                    assert!(parse(nested(open, close, MAX_DEPTH).as_bytes()).is_ok());
                    assert_eq!(parse(nested(open, close, MAX_DEPTH + 1).as_bytes()), Err(JsonError::Depth));
                    assert_eq!(parse(open.repeat(1_000_000).as_bytes()), Err(JsonError::Depth));
                }
            })
            .unwrap()
            .join()
            .unwrap();
    }

    proptest::proptest! {
        #[test]
        fn never_panics_on_bytes(body in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = parse(&body);
        }

        #[test]
        fn strings_round_trip(text in ".*") {
            let mut body = String::from("\"");
            for unit in text.encode_utf16() {
                body.push_str(&format!("\\u{unit:04x}"));
            }
            body.push('"');
            proptest::prop_assert_eq!(parse(body.as_bytes()), Ok(Json::String(text)));
        }
    }
}
