//! Owns the small tokenizer of synthetic checkpoints: byte-level byte-pair encoding over a list of common words, with the
//! delimiters under the names that Kev uses.

use serde_json::{Map, Value, json};

/// Words whose beginnings are tokens, alone and after a space. Short words become one token; a long one may fall apart where
/// an earlier word's merge takes a piece out of its middle.
const WORDS: &str = "the of and to in is that it was for on are as with his they at be this from have or by one had not \
    but what all were when we there can an your which their said if do will each about how up out them then she many some \
    so these would other into has more her two like him see time could no make than first been its who now people my made \
    over did down only way find use may water long little very after words called just where most know get through back \
    much before go good new write our used me man too any day same right look think also around another came come work \
    three word must because does part even place well such here take why things help put years different away again off \
    went old number great tell men say small every found still between name should home big give air line set own under \
    read last never us left end along while might next sound below saw something thought both few those always looked \
    show large often together asked house world going want school important until form food keep children feet land side \
    without boy once animals life enough took sometimes four head above kind began almost live page got earth need far \
    hand high year mother light parts country father let night following picture being study second eyes soon times story \
    boys since white days ever paper hard near sentence better best across during today others however sure means knew \
    customer order refund charge charged twice money ticket team billing shipping technical support account payment \
    invoice delivery delivered package late damaged broken cancel subscription email password login error please thanks \
    yes low medium high urgent severe minor critical frustrated calm angry happy satisfied question answer reason priority \
    contract date renewal notice agreement party parties signed clause termination term terms months days weeks price \
    document section data report summary policy review approved rejected pending does mention state";

/// Tokens that text cannot produce by merging, in the order of their ids.
const ADDED: [&str; 9] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
];

/// As in the published files, this one stands in `tokenizer_config.json` only.
const CONFIG_ONLY: &str = "<think>";

/// `tokenizer.json` and `tokenizer_config.json`.
pub(crate) fn files() -> (Value, Value) {
    let alphabet: Vec<char> = byte_alphabet();
    let mut vocabulary: Vec<String> = alphabet.iter().map(char::to_string).collect();
    let mut merges = Vec::new();
    for word in WORDS.split_whitespace() {
        for start in ["", " "] {
            let text = format!("{start}{word}");
            let mut pieces = text.bytes().map(|byte| alphabet[usize::from(byte)].to_string());
            let Some(mut whole) = pieces.next() else { continue };
            for piece in pieces {
                let longer = format!("{whole}{piece}");
                if !vocabulary.contains(&longer) {
                    merges.push(json!([whole, piece]));
                    vocabulary.push(longer.clone());
                }
                whole = longer;
            }
        }
    }
    let first = vocabulary.len();
    let vocabulary: Map<String, Value> =
        vocabulary.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    let added = |special: bool, content: &str| {
        json!({
            "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special,
        })
    };
    let mut listed = Vec::new();
    let mut decoder = Map::new();
    for (index, content) in ADDED.into_iter().enumerate() {
        let mut token = added(true, content);
        decoder.insert((first + index).to_string(), token.clone());
        token["id"] = json!(first + index);
        listed.push(token);
    }
    decoder.insert((first + ADDED.len()).to_string(), added(false, CONFIG_ONLY));
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let definition = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": listed,
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            {
                "type": "Split",
                "pattern": { "Regex": crate::tokenizer::PreTokenizer::Qwen2.expression() },
                "behavior": "Isolated",
                "invert": false,
            },
            byte_level,
        ] },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges,
        },
    });
    let config = json!({
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": false,
        "add_prefix_space": false,
        "added_tokens_decoder": decoder,
        "bos_token": null,
        "eos_token": ADDED[0],
        "pad_token": ADDED[0],
        "unk_token": null,
        "errors": "replace",
        "model_max_length": 262_144,
    });
    (definition, config)
}

/// The character that byte-level encodings write for every byte: printable Latin-1 stands for itself, the rest follows from
/// U+0100 on.
fn byte_alphabet() -> Vec<char> {
    let mut next = 0x100u32;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
            _ => {
                let stand_in = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
                next += 1;
                stand_in
            }
        })
        .collect()
}
