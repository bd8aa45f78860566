//! Owns the inference that must succeed before anyone may listen.

use artifact::Export;
use decision::{Branch, Tree};
use scheduler::{Execute, ExecuteError};

/// Runs questions with two, three and five options about a state of several chunks, and checks that every logit is
/// finite.
///
/// # Errors
/// [`ExecuteError`] when the executor fails or a logit is not finite.
pub fn warm_up(executor: &mut impl Execute, export: &Export) -> Result<(), ExecuteError> {
    let delimiters = *export.tokenizer().delimiters();
    let vocab = export.geometry.vocab as u32;
    let word = |index: u32| index * 7 % vocab.min(200);
    let state: Vec<u32> = std::iter::once(delimiters.state_start).chain((1..150).map(word)).collect();
    let branches = [2, 3, 5]
        .into_iter()
        .map(|options| {
            let mut tokens = vec![delimiters.question_start, word(3), word(5)];
            let mut option_ends = Vec::new();
            for option in 0..options {
                tokens.extend([delimiters.option_start, word(option + 11)]);
                option_ends.push(tokens.len());
                tokens.push(delimiters.option_end);
            }
            let decide = tokens.len();
            tokens.push(delimiters.decide);
            Branch { tokens, decide, option_ends }
        })
        .collect();
    let tree = Tree { state: state.into(), branches };
    let outcomes = executor.execute(std::slice::from_ref(&tree))?;
    if outcomes.iter().flat_map(|outcome| &outcome.logits).flatten().all(|logit| logit.is_finite()) {
        return Ok(());
    }
    Err(ExecuteError { reason: "warm-up gave a logit that is not finite: the weights are broken".to_owned() })
}
