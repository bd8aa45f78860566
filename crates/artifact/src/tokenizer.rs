//! Owns the tokenizer: the export's files read by the Hugging Face engine, with the pre-tokenizer and the added tokens
//! chosen on purpose. Knows nothing of prompts; the processor escapes text before it comes here.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// How text is split into pieces before byte-pair encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreTokenizer {
    /// Qwen2's expression: a combining mark is not part of a word. What the pinned reference uses.
    Qwen2,
    /// Qwen3.5's expression: combining marks belong to words.
    Qwen35,
}

impl PreTokenizer {
    /// The choice the pinned reference makes for a base: the class its `tokenizer_config.json` names decides, not the
    /// expression in its `tokenizer.json`.
    ///
    /// # Errors
    /// [`TokenizerError::Class`] for a class this program has no expression for.
    pub fn for_config(config: &Value) -> Result<Self, TokenizerError> {
        match config.get("tokenizer_class").and_then(Value::as_str) {
            Some("Qwen2Tokenizer" | "Qwen2TokenizerFast") => Ok(Self::Qwen2),
            Some("Qwen3_5Tokenizer" | "Qwen3_5TokenizerFast") => Ok(Self::Qwen35),
            other => {
                Err(TokenizerError::Class { found: other.unwrap_or("nothing").chars().take(80).collect() })
            }
        }
    }

    pub(crate) fn expression(self) -> &'static str {
        match self {
            Self::Qwen2 => concat!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
                r"|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            Self::Qwen35 => concat!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                r"|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        }
    }
}

/// Why a tokenizer was refused or a text could not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file cannot be read.
    #[error("{path}: cannot read: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{path}: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No pre-tokenizer is known for the base's class.
    #[error(
        "tokenizer_config.json: tokenizer_class: expected Qwen2Tokenizer or Qwen3_5Tokenizer, found {found}"
    )]
    Class {
        /// The class named.
        found: String,
    },
    /// A delimiter is not one token, or is not distinct.
    #[error("tokenizer.json: delimiter {token}: {reason}")]
    Delimiter {
        /// The delimiter.
        token: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The engine failed on a text.
    #[error("text cannot be tokenised: {0}")]
    Encode(String),
}

/// Token ids that structure a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delimiters {
    /// Before the state.
    pub state_start: u32,
    /// Before a question.
    pub question_start: u32,
    /// Before an option.
    pub option_start: u32,
    /// After an option; its hidden state is the option's key.
    pub option_end: u32,
    /// Last token of a question; its hidden state is the query.
    pub decide: u32,
}

const ROLES: [&str; 5] =
    ["<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>"];

/// A tokenizer ready to encode.
pub struct Tokenizer {
    engine: tokenizers::Tokenizer,
    delimiters: Delimiters,
    pre_tokenizer: PreTokenizer,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("pre_tokenizer", &self.pre_tokenizer).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` and `tokenizer_config.json` of a directory.
    ///
    /// # Errors
    /// [`TokenizerError`] naming the file or the delimiter.
    pub fn open(dir: &Path, pre_tokenizer: PreTokenizer) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        let mut definition = read(&path)?;
        let config = read(&dir.join("tokenizer_config.json"))?;
        add_tokens(&mut definition, &config, &path)?;
        definition["normalizer"] = json!({ "type": "NFC" });
        definition["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": pre_tokenizer.expression() }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false },
        ] });
        definition["truncation"] = Value::Null;
        definition["padding"] = Value::Null;
        let engine: tokenizers::Tokenizer = serde_json::from_value(definition)
            .map_err(|error| TokenizerError::Format { path, reason: error.to_string() })?;
        let delimiters = delimiters(&engine)?;
        let tokenizer = Self { engine, delimiters, pre_tokenizer };
        tokenizer.check_delimiters()?;
        Ok(tokenizer)
    }

    /// Token ids of a text, without special tokens around it.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] when the engine fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let encoding = self
            .engine
            .encode_fast(text, false)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids that structure a prompt.
    pub fn delimiters(&self) -> &Delimiters {
        &self.delimiters
    }

    /// The split in use.
    pub fn pre_tokenizer(&self) -> PreTokenizer {
        self.pre_tokenizer
    }

    /// One more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.engine.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1)
    }

    /// Every delimiter must be one id of its own, and its escaped spelling must not contain it.
    fn check_delimiters(&self) -> Result<(), TokenizerError> {
        for token in ROLES {
            let fail = |reason: String| TokenizerError::Delimiter { token, reason };
            let ids = self.encode(token)?;
            if ids.len() != 1 {
                return Err(fail(format!("is {} tokens, expected one", ids.len())));
            }
            let escaped = token.replace("<|", "<\u{a6}").replace("|>", "\u{a6}>");
            if self.encode(&escaped)?.contains(&ids[0]) {
                return Err(fail("escaped text still produces it".to_owned()));
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<Value, TokenizerError> {
    let bytes = std::fs::read(path).map_err(|source| TokenizerError::Io { path: path.to_owned(), source })?;
    let value: Value = serde_json::from_slice(&bytes)
        .map_err(|error| TokenizerError::Format { path: path.to_owned(), reason: error.to_string() })?;
    if value.is_object() {
        return Ok(value);
    }
    Err(TokenizerError::Format { path: path.to_owned(), reason: "is not a JSON object".to_owned() })
}

/// Adds the tokens that only `tokenizer_config.json` lists: without them `<think>` would fall apart into several ids.
fn add_tokens(definition: &mut Value, config: &Value, path: &Path) -> Result<(), TokenizerError> {
    let fail = |reason: String| TokenizerError::Format { path: path.to_owned(), reason };
    let mut tokens = match definition.get("added_tokens") {
        Some(Value::Array(tokens)) => tokens.clone(),
        None => Vec::new(),
        Some(_) => return Err(fail("added_tokens is not an array".to_owned())),
    };
    if let Some(more) = config.get("added_tokens_decoder").and_then(Value::as_object) {
        for (id, token) in more {
            let id: u32 = id.parse().map_err(|_| fail(format!("added token id {id:.40} is not a number")))?;
            let content = token.get("content").and_then(Value::as_str).unwrap_or_default();
            match tokens.iter().find(|known| known["content"] == content) {
                Some(known) if known["id"] == id => continue,
                Some(known) => {
                    return Err(fail(format!(
                        "token {content:?} is {} here and {id} in tokenizer_config.json",
                        known["id"]
                    )));
                }
                None => {}
            }
            let mut token = token.clone();
            token["id"] = json!(id);
            tokens.push(token);
        }
    }
    tokens.sort_by_key(|token| token["id"].as_u64());
    definition["added_tokens"] = Value::Array(tokens);
    Ok(())
}

fn delimiters(engine: &tokenizers::Tokenizer) -> Result<Delimiters, TokenizerError> {
    let mut ids = [0u32; 5];
    for (index, token) in ROLES.into_iter().enumerate() {
        ids[index] = engine.token_to_id(token).ok_or_else(|| TokenizerError::Delimiter {
            token,
            reason: "is not in the vocabulary".to_owned(),
        })?;
        if ids[..index].contains(&ids[index]) {
            return Err(TokenizerError::Delimiter {
                token,
                reason: format!("shares id {} with another one", ids[index]),
            });
        }
    }
    let [state_start, question_start, option_start, option_end, decide] = ids;
    Ok(Delimiters { state_start, question_start, option_start, option_end, decide })
}
