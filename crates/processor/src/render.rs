//! Owns how JSON becomes the text a model reads, and how a caller's text is kept from forging delimiters.

use decision::Json;

use crate::pytext;

/// Longest rendered text of one value. Deep nesting multiplies a body's size by its indentation; no text near this size
/// fits a context window.
const MAX_BYTES: usize = 64 << 20;

/// A value whose text would be longer than any context window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

/// Renders a value: scalars as Python's `str`, arrays as `- ` lines, objects as `key: value` lines, nested ones indented
/// by two spaces a level. An element of an array loses its leading white space.
pub(crate) fn render(value: &Json) -> Result<String, TooLong> {
    let mut out = Out { text: String::new(), stripping: false };
    out.value(value, 0)?;
    Ok(out.text)
}

/// The text of a named option: the name alone, or with its description. An empty container still adds the colon.
pub(crate) fn option_text(name: &str, description: &Json) -> Result<String, TooLong> {
    match description {
        Json::Null => Ok(name.to_owned()),
        Json::String(text) if text.is_empty() => Ok(name.to_owned()),
        other => Ok(format!("{name}: {}", render(other)?)),
    }
}

struct Out {
    text: String,
    /// White space is dropped until something else comes. One flag serves nested elements too: what an inner element
    /// drops, an outer one would have dropped as well.
    stripping: bool,
}

impl Out {
    fn push(&mut self, text: &str) -> Result<(), TooLong> {
        let text = if self.stripping { text.trim_start_matches(is_python_space) } else { text };
        if !text.is_empty() {
            self.stripping = false;
            if self.text.len() + text.len() > MAX_BYTES {
                return Err(TooLong);
            }
            self.text.push_str(text);
        }
        Ok(())
    }

    fn indent(&mut self, level: usize) -> Result<(), TooLong> {
        (0..level).try_for_each(|_| self.push("  "))
    }

    fn value(&mut self, value: &Json, level: usize) -> Result<(), TooLong> {
        match value {
            Json::Null => Ok(()),
            Json::Bool(true) => self.push("True"),
            Json::Bool(false) => self.push("False"),
            Json::Number(number) => self.push(&pytext::number(number)),
            Json::String(text) => self.push(text),
            Json::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        self.push("\n")?;
                    }
                    self.indent(level)?;
                    self.push("- ")?;
                    self.stripping = true;
                    self.value(item, level + 1)?;
                    self.stripping = false;
                }
                Ok(())
            }
            Json::Object(map) => {
                for (index, (key, item)) in map.iter().enumerate() {
                    if index > 0 {
                        self.push("\n")?;
                    }
                    self.indent(level)?;
                    self.push(key)?;
                    self.push(":")?;
                    if matches!(item, Json::Array(_) | Json::Object(_)) {
                        self.push("\n")?;
                        self.value(item, level + 1)?;
                    } else {
                        self.push(" ")?;
                        self.value(item, 0)?;
                    }
                }
                Ok(())
            }
        }
    }
}

/// What `str.lstrip()` removes: Unicode white space and the four ASCII separators.
fn is_python_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// Makes a text unable to forge a delimiter: every `<|name|>` becomes `<¦name¦>`, in one pass from the left.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("<|") {
        let name = &rest[start + 2..];
        let length = name.bytes().take_while(|byte| byte.is_ascii_alphanumeric() || *byte == b'_').count();
        if length > 0 && name[length..].starts_with("|>") {
            out.push_str(&rest[..start]);
            out.push_str("<\u{a6}");
            out.push_str(&name[..length]);
            out.push_str("\u{a6}>");
            rest = &name[length + 2..];
        } else {
            // Not a delimiter here; one may begin right after the `<`.
            out.push_str(&rest[..=start]);
            rest = &rest[start + 1..];
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(body: &str) -> String {
        render(&decision::parse::parse(body.as_bytes()).unwrap()).unwrap()
    }

    #[test]
    fn renders_every_kind_of_value() {
        let cases = [
            ("null", ""),
            ("true", "True"),
            ("1E2", "100.0"),
            ("\" a\\nb \"", " a\nb "),
            ("[]", ""),
            ("{}", ""),
            ("[1,\"  x\",null,[2,[3]]]", "- 1\n- x\n- \n- - 2\n  - - 3"),
            ("{\"a\":1,\"b\":[1,2],\"c\":{\"d\":null}}", "a: 1\nb:\n  - 1\n  - 2\nc:\n  d: "),
            ("{\"a\":[],\"b\":{}}", "a:\n\nb:\n"),
            ("[{\"k\":1,\"l\":2}]", "- k: 1\n  l: 2"),
            ("[\"\\u001c\\u00a0\\u2003x\"]", "- x"),
            ("[[\"  \"],\" \"]", "- - \n- "),
            ("[{\" \":1}]", "- : 1"),
        ];
        for (body, text) in cases {
            assert_eq!(rendered(body), text, "{body}");
        }
    }

    #[test]
    fn deep_and_wide_values_are_refused_before_they_fill_memory() {
        let body = "[".repeat(400) + &"1,".repeat(500_000) + "1" + &"]".repeat(400);
        assert_eq!(render(&decision::parse::parse(body.as_bytes()).unwrap()), Err(TooLong));
    }

    #[test]
    fn escapes_once_from_the_left() {
        let cases = [
            ("<|fim_prefix|>", "<\u{a6}fim_prefix\u{a6}>"),
            ("<|a|><|b|>", "<\u{a6}a\u{a6}><\u{a6}b\u{a6}>"),
            ("<|a b|>", "<|a b|>"),
            ("<||>", "<||>"),
            ("<<|a|>>", "<<\u{a6}a\u{a6}>>"),
            ("<|<|a|>|>", "<|<\u{a6}a\u{a6}>|>"),
            ("<|a|b|>", "<|a|b|>"),
            ("<|a<|b|>", "<|a<\u{a6}b\u{a6}>"),
            ("<|\u{e9}|>", "<|\u{e9}|>"),
            ("<|", "<|"),
            ("<think>", "<think>"),
        ];
        for (text, escaped) in cases {
            assert_eq!(escape(text), escaped, "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_delimiter_survives(text in "([<|>_]|[a-c]){0,40}") {
            let escaped = escape(&text);
            for start in escaped.match_indices("<|").map(|(at, _)| at + 2) {
                let name: String = escaped[start..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
                proptest::prop_assert!(name.is_empty() || !escaped[start + name.len()..].starts_with("|>"), "{}", escaped);
            }
        }
    }
}
