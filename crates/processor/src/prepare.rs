//! Owns the way from a request to a token tree: render, escape, tokenise each piece on its own, place the readouts.

use std::sync::Arc;

use artifact::Tokenizer;
use decision::{Branch, DecisionRequest, Question, QuestionKind, QuestionType, Tree};

use crate::dates;
use crate::render::{TooLong, escape, option_text, render};
use crate::request::RequestError;

/// What a deployment accepts and adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessorOptions {
    /// Longest state in tokens, its start token included.
    pub max_state_tokens: usize,
    /// Longest state plus one question in tokens.
    pub max_row_tokens: usize,
    /// Longest question by itself, in tokens.
    pub max_question_tokens: usize,
    /// Cut a longer state instead of refusing it.
    pub truncate_states: bool,
    /// Add facts about the dates of a state.
    pub date_facts: bool,
}

impl Default for ProcessorOptions {
    fn default() -> Self {
        Self {
            max_state_tokens: 65_536,
            max_row_tokens: 73_728,
            max_question_tokens: 73_728,
            truncate_states: false,
            date_facts: false,
        }
    }
}

/// Prepares requests and finishes answers; cheap to share.
#[derive(Clone, Debug)]
pub struct Processor {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) temperature: f64,
    options: ProcessorOptions,
}

/// A request ready to be queued.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// What the model reads.
    pub tree: Tree,
    /// The rendered texts, before escaping.
    pub texts: Texts,
    /// What [`Processor::finish`] needs to answer.
    pub context: ResponseContext,
}

/// Rendered texts of a request, before escaping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Texts {
    /// The state.
    pub state: String,
    /// Per question.
    pub questions: Vec<QuestionTexts>,
}

/// Rendered texts of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuestionTexts {
    /// The instructions.
    pub instructions: String,
    /// The options, in the order the model reads them.
    pub options: Vec<String>,
}

/// What answers need of their request; it never reaches the executor.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponseContext {
    /// The model name to echo.
    pub model: String,
    /// Tokens the model reads: state once plus every question.
    pub input_tokens: usize,
    /// Tokens of the state before and after truncation.
    pub state_tokens: (usize, usize),
    pub(crate) questions: Vec<AnswerContext>,
}

/// What one answer needs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AnswerContext {
    pub(crate) id: String,
    pub(crate) question_type: QuestionType,
    /// Option names of a choice, level texts of a score, empty for a noul.
    pub(crate) names: Vec<String>,
}

impl ResponseContext {
    /// Whether the state was cut.
    pub fn truncated(&self) -> bool {
        self.state_tokens.0 != self.state_tokens.1
    }

    /// Ids and types of the questions, in request order.
    pub fn questions(&self) -> impl Iterator<Item = (&str, QuestionType)> {
        self.questions.iter().map(|question| (question.id.as_str(), question.question_type))
    }
}

impl Processor {
    /// A processor over an export's tokenizer and temperature.
    pub fn new(tokenizer: Arc<Tokenizer>, temperature: f64, options: ProcessorOptions) -> Self {
        Self { tokenizer, temperature, options }
    }

    /// The options in use.
    pub fn options(&self) -> &ProcessorOptions {
        &self.options
    }

    /// Renders and tokenises a whole request. Blocking and CPU-bound: milliseconds for most requests, seconds for
    /// megabytes of text.
    ///
    /// # Errors
    /// [`RequestError::TooLong`] or [`RequestError::TooLarge`] naming the text; [`RequestError::Tokenizer`].
    pub fn prepare(&self, request: &DecisionRequest) -> Result<Prepared, RequestError> {
        let delimiters = *self.tokenizer.delimiters();
        let state_text = self
            .state_text(request)
            .map_err(|TooLong| RequestError::TooLarge { what: "state".to_owned() })?;
        let mut state = vec![delimiters.state_start];
        state.extend(self.encode(&state_text, "state")?);
        let limit = self.options.max_state_tokens;
        let full = state.len();
        if full > limit {
            if !self.options.truncate_states {
                return Err(RequestError::TooLong { what: "state".to_owned(), tokens: full, limit });
            }
            state.truncate(limit);
        }
        let mut branches = Vec::with_capacity(request.questions.len());
        let mut texts = Vec::with_capacity(request.questions.len());
        let mut answers = Vec::with_capacity(request.questions.len());
        for (index, question) in request.questions.iter().enumerate() {
            let what = || format!("question {}", index + 1);
            let rendered =
                question_texts(question).map_err(|TooLong| RequestError::TooLarge { what: what() })?;
            let mut tokens = vec![delimiters.question_start];
            tokens.extend(self.encode(&rendered.instructions, &what())?);
            let mut option_ends = Vec::with_capacity(rendered.options.len());
            for option in &rendered.options {
                tokens.push(delimiters.option_start);
                tokens.extend(self.encode(option, &what())?);
                option_ends.push(tokens.len());
                tokens.push(delimiters.option_end);
            }
            let decide = tokens.len();
            tokens.push(delimiters.decide);
            let row = state.len() + tokens.len();
            if tokens.len() > self.options.max_question_tokens {
                let limit = self.options.max_question_tokens;
                return Err(RequestError::TooLong { what: what(), tokens: tokens.len(), limit });
            }
            if row > self.options.max_row_tokens {
                let what = format!("{} with its state", what());
                return Err(RequestError::TooLong { what, tokens: row, limit: self.options.max_row_tokens });
            }
            answers.push(answer_context(question, &rendered));
            texts.push(rendered);
            branches.push(Branch { tokens, decide, option_ends });
        }
        let state_tokens = (full, state.len());
        let tree = Tree { state: state.into(), branches };
        Ok(Prepared {
            context: ResponseContext {
                model: request.model.clone(),
                input_tokens: tree.input_tokens(),
                state_tokens,
                questions: answers,
            },
            tree,
            texts: Texts { state: state_text, questions: texts },
        })
    }

    fn state_text(&self, request: &DecisionRequest) -> Result<String, TooLong> {
        if self.options.date_facts {
            render(&dates::annotate(&request.state)?)
        } else {
            render(&request.state)
        }
    }

    fn encode(&self, text: &str, what: &str) -> Result<Vec<u32>, RequestError> {
        self.tokenizer
            .encode(&escape(text))
            .map_err(|error| RequestError::Tokenizer { what: what.to_owned(), reason: error.to_string() })
    }
}

fn question_texts(question: &Question) -> Result<QuestionTexts, TooLong> {
    let options = match &question.kind {
        QuestionKind::Noul { no, yes } => vec![option_text("no", no)?, option_text("yes", yes)?],
        QuestionKind::Choice { options } => options
            .iter()
            .map(|(name, description)| option_text(name, description))
            .collect::<Result<_, _>>()?,
        QuestionKind::Score { levels } => levels.iter().map(render).collect::<Result<_, _>>()?,
    };
    Ok(QuestionTexts { instructions: render(&question.instructions)?, options })
}

fn answer_context(question: &Question, rendered: &QuestionTexts) -> AnswerContext {
    let names = match &question.kind {
        QuestionKind::Noul { .. } => Vec::new(),
        QuestionKind::Choice { options } => options.iter().map(|(name, _)| name.clone()).collect(),
        QuestionKind::Score { .. } => rendered.options.clone(),
    };
    AnswerContext { id: question.id.clone(), question_type: question.kind.question_type(), names }
}
