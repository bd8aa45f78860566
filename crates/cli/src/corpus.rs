//! Owns `omni-kev corpus`: requests for captures of synthetic checkpoints, the same for a seed everywhere. They cover every
//! type, JSON shapes, Unicode and lengths; what they say means nothing.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

/// Arguments of `corpus`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Questions at least
    #[arg(long, env = "OMNI_KEV_QUESTIONS", default_value_t = 2000)]
    questions: usize,
    /// Words of a state at most
    #[arg(long, env = "OMNI_KEV_STATE_WORDS", default_value_t = 300)]
    state_words: usize,
    /// Seed
    #[arg(long, env = "OMNI_KEV_SEED", default_value_t = 0)]
    seed: u64,
    /// File to write; `-` for standard output
    #[arg(long, env = "OMNI_KEV_OUT", value_name = "FILE")]
    out: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut random = Random(arguments.seed);
    let mut text = String::new();
    let (mut questions, mut cases) = (0, 0);
    while questions < arguments.questions {
        let request = request(&mut random, arguments.state_words.max(1));
        questions += request["questions"].as_object().map_or(0, Map::len);
        text.push_str(&json!({ "name": format!("synthetic-{cases:05}"), "request": request }).to_string());
        text.push('\n');
        cases += 1;
    }
    if arguments.out == std::path::Path::new("-") {
        std::io::stdout().lock().write_all(text.as_bytes())?;
    } else {
        std::fs::write(&arguments.out, text)
            .with_context(|| format!("cannot write {}", arguments.out.display()))?;
    }
    eprintln!("wrote {questions} questions in {cases} requests");
    Ok(())
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end.max(1) as u64) as usize
    }

    fn text(&mut self, words: usize) -> String {
        let chosen: Vec<&str> = (0..words.max(1)).map(|_| WORDS[self.below(WORDS.len())]).collect();
        chosen.join(" ")
    }
}

const WORDS: [&str; 72] = [
    "the",
    "order",
    "customer",
    "was",
    "late",
    "and",
    "refund",
    "please",
    "contract",
    "renewal",
    "notice",
    "sixty",
    "days",
    "payment",
    "4411",
    "2024-03-01",
    "twice",
    "charged",
    "team",
    "urgent",
    "not",
    "is",
    "a",
    "of",
    "to",
    "password",
    "login",
    "error",
    "invoice",
    "number",
    "19.90",
    "EUR",
    "before",
    "after",
    "the end",
    "damaged",
    "package",
    "delivery",
    "arrived",
    "never",
    "Straße",
    "für",
    "café",
    "naïve",
    "数据",
    "退款",
    "注文",
    "заказ",
    "возврат",
    "नमस्ते",
    "สวัสดี",
    "مرحبا",
    "😀",
    "👩‍👩‍👧",
    "—",
    "…",
    "\n",
    "\t",
    "  ",
    "(see below)",
    "#7",
    "50%",
    "x = y + 1",
    "if (a < b)",
    "https://example.org/?q=1",
    "user@example.org",
    "NULL",
    "True",
    "<think>",
    "<|im_end|>",
    "e\u{301}",
    "\u{200d}",
];

/// Texts about as long as people write them: mostly short, some long.
fn length(random: &mut Random, most: usize) -> usize {
    let scale = [8, 20, 45, 120, most][random.below(5)].min(most);
    1 + random.below(scale)
}

fn request(random: &mut Random, state_words: usize) -> Value {
    let words = length(random, state_words);
    let state = match random.below(4) {
        0 => {
            json!({ "ticket": random.text(words), "meta": { "open": random.below(2) == 1, "count": random.below(1000) } })
        }
        1 => {
            json!([random.text(words), random.below(100), null, { "price": random.below(10_000) as f64 / 100.0 }])
        }
        _ => json!(random.text(words)),
    };
    let mut questions = Map::new();
    for index in 0..1 + random.below(6) {
        let mut question = match random.below(3) {
            0 => choice(random),
            1 => noul(random),
            _ => score(random),
        };
        if random.below(8) > 0 {
            let words = 2 + random.below(14);
            question["instructions"] = json!(random.text(words));
        }
        questions.insert(format!("q{index}"), question);
    }
    json!({ "state": state, "questions": questions })
}

fn choice(random: &mut Random) -> Value {
    let mut criteria = Map::new();
    for index in 0..2 + random.below(5) {
        let name = format!("{} {index}", WORDS[random.below(40)]);
        let words = 1 + random.below(8);
        let description = if random.below(2) == 0 { Value::Null } else { json!(random.text(words)) };
        criteria.insert(name, description);
    }
    json!({ "type": "choice", "criteria": criteria })
}

fn noul(random: &mut Random) -> Value {
    let words = 1 + random.below(6);
    match random.below(2) {
        0 => json!({ "type": "noul" }),
        _ => {
            json!({ "type": "noul", "criteria": { "true": random.text(words), "false": random.text(words) } })
        }
    }
}

fn score(random: &mut Random) -> Value {
    let levels: Vec<String> = (0..2 + random.below(6))
        .map(|_| {
            let words = 1 + random.below(5);
            random.text(words)
        })
        .collect();
    json!({ "type": "score", "criteria": levels })
}
