//! Owns the file of API keys: one a line, with or without a name. No error quotes a line.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use server::ApiKey;

/// The keys of a file.
pub(crate) fn read(path: &Path) -> Result<Vec<ApiKey>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| path.display().to_string())
}

fn parse(text: &str) -> Result<Vec<ApiKey>> {
    let mut keys = Vec::new();
    for (number, line) in lines(text) {
        keys.push(key(line).with_context(|| format!("line {number}"))?);
    }
    anyhow::ensure!(!keys.is_empty(), "holds no key: expected one a line");
    Ok(keys)
}

/// Lines that hold something, with their numbers. What some editors put before the first line is no part of its key.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.trim_start_matches('\u{feff}').lines().enumerate();
    numbered
        .map(|(index, line)| (index + 1, line.trim()))
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

/// `<key>` or `<name> <key>`. Keys may hold colons, so blanks part the two.
fn key(line: &str) -> Result<ApiKey> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        [key] => secret(key),
        [name, key] => secret(key)?
            .named(name)
            .context("expected a name of 1 to 64 of A-Z a-z 0-9 _ . - before the key, found another"),
        _ => anyhow::bail!("expected a key, or a name and a key, found {} words", words.len()),
    }
}

fn secret(word: &str) -> Result<ApiKey> {
    let Some(digits) = word.strip_prefix("sha256:") else { return Ok(ApiKey::new(word)) };
    let mut digest = [0; 32];
    hex::decode_to_slice(digits, &mut digest)
        .map_err(|_| anyhow::anyhow!("sha256: expects 64 hexadecimal digits"))?;
    Ok(ApiKey::hashed(digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    #[test]
    fn a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_key() {
        let found: Vec<(usize, &str)> = lines("\u{feff}one\r\n# no\r\n\r\nname two\r\n").collect();
        assert_eq!(found, [(1, "one"), (4, "name two")]);
    }

    #[test]
    fn key_files_hold_keys_digests_names_and_comments() {
        let text = format!(
            "# team\n one \n\ntwo:with:colons\nsha256:{DIGEST}\nteam-a three\n\tB.c_9 \t sha256:{DIGEST}\n"
        );
        assert_eq!(parse(&text).unwrap().len(), 5);
        for bad in [
            "",
            "\n# nothing\n",
            "sha256:12",
            "sha256:zz",
            "name sha256:12",
            "na:me key",
            "one two three",
            &format!("{} key", "n".repeat(65)),
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn errors_name_the_line_and_quote_nothing() {
        for bad in ["sha256:hidden", "hid:den hidden", "hidden hidden hidden"] {
            let error = format!("{:#}", parse(&format!("ok\n{bad}\n")).unwrap_err());
            assert!(error.contains("line 2") && !error.contains("hid"), "{error}");
        }
    }
}
