//! Owns the OpenAPI description: schemas from the types below, errors from the table, paths from the routes. The request
//! types are only described here; the processor reads requests, since the order of keys and the spelling of numbers matter.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use serde_json::Value;
use utoipa::openapi::path::{
    HttpMethod, Operation, OperationBuilder, Parameter, ParameterBuilder, ParameterIn, PathItem,
};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{
    AdditionalProperties, ArrayBuilder, Object, ObjectBuilder, OneOfBuilder, Ref, Schema, Type,
};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, Header, InfoBuilder, OpenApi, OpenApiBuilder, PathsBuilder, RefOr,
    Required, ResponseBuilder,
};
use utoipa::{PartialSchema, ToSchema};

use crate::decide::REQUEST_TIMEOUT;
use crate::error::{Row, Scope, Shape, TABLE};
use crate::routes::{HEALTH, METRICS, MODELS, OPENAPI, PERMUTE, READY, SEPARATE, SYSTEMONE};
use crate::wire::{ModelCard, Models};

/// A state and the questions about it. Unknown fields are ignored.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct SystemOneRequest {
    /// Echoed in the response; `kev-latest` when absent. Any name is accepted.
    #[schema(required = false)]
    model: String,
    /// Any JSON value; objects are read in the order of their keys.
    state: Value,
    /// Question id and question; at least one. Ids never reach the model.
    #[schema(schema_with = questions)]
    questions: BTreeMap<String, Question>,
}

/// A question. Unknown fields are ignored.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
#[schema(rename_all = "lowercase")]
#[serde(tag = "type", rename_all = "lowercase")]
enum Question {
    /// Yes or no?
    Noul {
        /// Any JSON value.
        #[schema(required = false)]
        instructions: Value,
        /// What yes and no mean; either may be absent or null.
        criteria: Option<NoulCriteria>,
    },
    /// Which of up to 255 options?
    Choice {
        /// Any JSON value.
        #[schema(required = false)]
        instructions: Value,
        /// Option name and description; null or empty means none. The order matters.
        #[schema(schema_with = options)]
        criteria: BTreeMap<String, Value>,
    },
    /// Which of up to 255 levels, lowest first?
    Score {
        /// Any JSON value.
        #[schema(required = false)]
        instructions: Value,
        /// The levels.
        #[schema(min_items = 1, max_items = 255)]
        criteria: Vec<Value>,
    },
}

/// What the answers of a yes-or-no question mean.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct NoulCriteria {
    /// What yes means.
    #[serde(rename = "true")]
    #[schema(required = false)]
    yes: Value,
    /// What no means.
    #[serde(rename = "false")]
    #[schema(required = false)]
    no: Value,
}

/// The answers, in the order of the questions.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct SystemOneResponse {
    /// The request's model name.
    model: String,
    /// Question id and answer.
    answers: BTreeMap<String, Answer>,
    usage: Usage,
    /// Model time in milliseconds; only if switched on.
    latency_ms: Option<f64>,
    /// Whether the state was cut; only where states may be cut.
    truncated: Option<bool>,
}

/// Numbers have 4 decimals.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
#[serde(tag = "type", rename_all = "lowercase")]
enum Answer {
    /// Of a yes-or-no question.
    Noul {
        /// Probability of yes.
        #[schema(minimum = 0, maximum = 1)]
        noul: f64,
    },
    /// Of a choice.
    Choice {
        /// The most probable option; the first of several.
        choice: String,
        /// How far it stands above an even spread.
        #[schema(minimum = 0, maximum = 1)]
        confidence: f64,
        /// Option name and probability, in the order of the request.
        probabilities: BTreeMap<String, f64>,
    },
    /// Of a score.
    Score {
        /// Expected level, counted from 0.
        #[schema(minimum = 0)]
        score: f64,
        /// Level number and its text.
        legend: BTreeMap<String, String>,
        /// Level number and probability.
        probabilities: BTreeMap<String, f64>,
        /// How narrow the distribution is around its mode.
        #[schema(minimum = 0, maximum = 1)]
        confidence: f64,
    },
}

/// Token counts.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct Usage {
    /// The state once plus every question.
    input_tokens: usize,
    /// The answers as JSON.
    output_tokens: usize,
    /// Only if switched on.
    input_tokens_details: Option<InputTokensDetails>,
    /// Tokens of the state; only where states may be cut.
    state_tokens: Option<usize>,
    /// Tokens of the state that were used; only where states may be cut.
    state_tokens_used: Option<usize>,
}

/// More about input tokens.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct InputTokensDetails {
    /// Tokens of the state that came from the prefix cache: all or none.
    cached_tokens: usize,
}

/// A choice question to be asked under several orders of its options.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct PermuteRequest {
    request: SystemOneRequest,
    /// Id of a choice question of the request.
    question: String,
    /// Number of orders, the given one first.
    #[schema(required = false, minimum = 1, maximum = 64, default = 6)]
    n_perm: u32,
    /// The same seed gives the same orders.
    #[schema(required = false, default = 0)]
    seed: i64,
}

/// The same question under several orders.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct PermuteResponse {
    runs: Vec<PermuteRun>,
    /// Whether every run chose the same option.
    argmax_stable: bool,
    /// Largest difference between two runs in the probability of one option.
    #[schema(minimum = 0, maximum = 1)]
    spread: f64,
}

/// One order.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct PermuteRun {
    /// Option names as the model read them.
    order: Vec<String>,
    /// Option name and probability, in that order.
    probabilities: BTreeMap<String, f64>,
    /// The most probable option.
    choice: String,
    /// Model time of all runs together, in milliseconds.
    latency_ms: f64,
}

/// The process is alive.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct Health {
    /// `ok`.
    status: String,
}

/// One thing that is wrong with a request.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct ErrorItem {
    /// Kind of error.
    r#type: String,
    /// Keys and indices from `body` on.
    loc: Vec<ErrorStep>,
    /// For people.
    msg: String,
    /// What was there, if it is short.
    #[schema(required = false)]
    input: Value,
    /// More about it.
    #[schema(required = false)]
    ctx: Value,
}

/// A key or an index.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
#[serde(untagged)]
enum ErrorStep {
    Key(String),
    Index(usize),
}

/// Body of `GET /ready`.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct Ready {
    /// `ready` or `not_ready`.
    status: String,
    /// Why not: `stopping` or `model_unavailable`.
    reason: Option<String>,
    /// Limits of this deployment, by name.
    limits: std::collections::BTreeMap<String, u64>,
}

/// What went wrong outside of the request's schema.
#[derive(ToSchema)]
#[allow(dead_code)] // Read by the schema generator only.
struct ErrorObject {
    /// Name of the error.
    error_type: String,
    /// For people.
    message: String,
}

/// utoipa's attributes cannot bound the number of keys.
fn questions() -> Object {
    let question = Ref::from_schema_name("Question");
    ObjectBuilder::new()
        .description(Some("Question id and question; at least one. Ids never reach the model."))
        .additional_properties(Some(question))
        .min_properties(Some(1))
        .build()
}

fn options() -> Object {
    ObjectBuilder::new()
        .description(Some("Option name and description; null or empty means none. The order matters."))
        .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(true)))
        .min_properties(Some(1))
        .max_properties(Some(255))
        .build()
}

/// The description of the server's routes: OpenAPI 3.1 as JSON. `keyed` says whether a key is asked for.
///
/// # Errors
/// When JSON cannot be written, which is a defect.
pub fn openapi(keyed: bool) -> Result<String, serde_json::Error> {
    document(keyed).to_json()
}

fn document(keyed: bool) -> OpenApi {
    let paths = PathsBuilder::new()
        .path(SYSTEMONE, PathItem::new(HttpMethod::Post, decide(SYSTEMONE, keyed)))
        .path(SEPARATE, PathItem::new(HttpMethod::Post, decide(SEPARATE, keyed)))
        .path(PERMUTE, PathItem::new(HttpMethod::Post, decide(PERMUTE, keyed)))
        .path(MODELS, PathItem::new(HttpMethod::Get, models(keyed)))
        .path(
            HEALTH,
            PathItem::new(HttpMethod::Get, fixed("health", "Whether the process is alive.", "Health")),
        )
        .path(READY, PathItem::new(HttpMethod::Get, ready()))
        .path(METRICS, PathItem::new(HttpMethod::Get, metrics()))
        .path(OPENAPI, PathItem::new(HttpMethod::Get, description()));
    let mut components = ComponentsBuilder::new()
        .schema("SystemOneRequest", SystemOneRequest::schema())
        .schema("Question", Question::schema())
        .schema("NoulCriteria", NoulCriteria::schema())
        .schema("SystemOneResponse", SystemOneResponse::schema())
        .schema("Answer", Answer::schema())
        .schema("Usage", Usage::schema())
        .schema("InputTokensDetails", InputTokensDetails::schema())
        .schema("PermuteRequest", PermuteRequest::schema())
        .schema("PermuteResponse", PermuteResponse::schema())
        .schema("PermuteRun", PermuteRun::schema())
        .schema("ModelCard", ModelCard::schema())
        .schema("Models", Models::schema())
        .schema("Health", Health::schema())
        .schema("Ready", Ready::schema())
        .schema("ErrorItem", ErrorItem::schema())
        .schema("ErrorStep", ErrorStep::schema())
        .schema("ErrorObject", ErrorObject::schema());
    if keyed {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components = components.security_scheme("key", SecurityScheme::Http(scheme));
    }
    let info = InfoBuilder::new()
        .title("omni-kev")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("Typed questions about a state, answered with calibrated probabilities."));
    OpenApiBuilder::new().info(info).paths(paths).components(Some(components.build())).build()
}

fn decide(path: &str, keyed: bool) -> Operation {
    let (id, summary, request, response) = match path {
        SEPARATE => ("separate", "Answers each question alone.", "SystemOneRequest", "SystemOneResponse"),
        PERMUTE => ("permute", "Asks one choice under several orders.", "PermuteRequest", "PermuteResponse"),
        _ => ("systemone", "Answers questions about a state.", "SystemOneRequest", "SystemOneResponse"),
    };
    let body = RequestBodyBuilder::new()
        .description(Some("JSON in UTF-8, optionally compressed (Content-Encoding: gzip or zstd)."))
        .content(
            "application/json",
            ContentBuilder::new().schema(Some(Ref::from_schema_name(request))).build(),
        )
        .required(Some(Required::True))
        .build();
    let operation =
        fixed_builder(id, summary, response).parameter(request_timeout()).request_body(Some(body));
    let applies = |row: &Row| match row.scope {
        Scope::Body => true,
        Scope::Keyed => keyed || row.status != StatusCode::UNAUTHORIZED,
        Scope::Permute => path == PERMUTE,
        Scope::Framework => false,
    };
    secured(errors(operation, applies), keyed).build()
}

fn request_timeout() -> Parameter {
    let number = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1)).build();
    ParameterBuilder::new()
        .name(REQUEST_TIMEOUT.as_str())
        .parameter_in(ParameterIn::Header)
        .required(Required::False)
        .description(Some(
            "Milliseconds from the headers to the answer, instead of this deployment's deadline and up to its \
             maximum; `GET /ready` tells both.",
        ))
        .schema(Some(number))
        .build()
}

fn models(keyed: bool) -> Operation {
    let operation = fixed_builder("models", "What requests may name.", "Models");
    let applies = |row: &Row| row.scope == Scope::Keyed && (keyed || row.status != StatusCode::UNAUTHORIZED);
    secured(errors(operation, applies), keyed).build()
}

fn description() -> Operation {
    let object = ObjectBuilder::new().schema_type(Type::Object).build();
    let content = ContentBuilder::new().schema(Some(object)).build();
    let response = ResponseBuilder::new().description("OpenAPI 3.1.").content("application/json", content);
    OperationBuilder::new()
        .operation_id(Some("openapi"))
        .summary(Some("This description."))
        .response("200", response.build())
        .build()
}

fn ready() -> Operation {
    let refused = ResponseBuilder::new()
        .description("No: `reason` is `stopping` or `model_unavailable`. Ask again after `Retry-After`.")
        .content(
            "application/json",
            ContentBuilder::new().schema(Some(Ref::from_schema_name("Ready"))).build(),
        );
    fixed_builder("ready", "Whether requests should come, and the limits they must keep.", "Ready")
        .response("503", marked(unavailable(refused)).build())
        .build()
}

fn metrics() -> Operation {
    let text = ObjectBuilder::new().schema_type(Type::String).build();
    let response = ResponseBuilder::new()
        .description("Prometheus' text format.")
        .content("text/plain", ContentBuilder::new().schema(Some(text)).build());
    OperationBuilder::new()
        .operation_id(Some("metrics"))
        .summary(Some("Counters."))
        .response("200", marked(response).build())
        .build()
}

fn fixed(id: &str, summary: &str, schema: &str) -> Operation {
    fixed_builder(id, summary, schema).build()
}

fn fixed_builder(id: &str, summary: &str, schema: &str) -> OperationBuilder {
    let schema = Ref::from_schema_name(schema);
    let response = marked(
        ResponseBuilder::new()
            .description(summary)
            .content("application/json", ContentBuilder::new().schema(Some(schema)).build()),
    );
    OperationBuilder::new().operation_id(Some(id)).summary(Some(summary)).response("200", response.build())
}

/// One response per status: the rows that share it, with every form its body may take.
fn errors(mut operation: OperationBuilder, applies: impl Fn(&Row) -> bool) -> OperationBuilder {
    let mut by_status: BTreeMap<u16, Vec<&Row>> = BTreeMap::new();
    for row in TABLE.into_iter().filter(|row| applies(row)) {
        by_status.entry(row.status.as_u16()).or_default().push(row);
    }
    for (status, rows) in by_status {
        let text: Vec<String> = rows.iter().map(|row| format!("`{}`: {}", row.code, row.doc)).collect();
        let shapes = [Shape::List, Shape::Object, Shape::Text];
        let mut forms =
            shapes.into_iter().filter(|shape| rows.iter().any(|row| row.shape == *shape)).map(form);
        let schema = match (forms.next(), forms.next()) {
            (Some(one), None) => one,
            (first, second) => {
                let all = first.into_iter().chain(second).chain(forms);
                Schema::OneOf(all.fold(OneOfBuilder::new(), OneOfBuilder::item).build())
            }
        };
        let content = ContentBuilder::new().schema(Some(schema)).build();
        let mut response =
            marked(ResponseBuilder::new().description(text.join(" ")).content("application/json", content));
        if status == StatusCode::SERVICE_UNAVAILABLE.as_u16() {
            response = unavailable(response);
        }
        operation = operation.response(status.to_string(), response.build());
    }
    operation
}

/// Headers of every 503.
fn unavailable(response: ResponseBuilder) -> ResponseBuilder {
    response
        .header("retry-after", header("Seconds to wait before trying again."))
        .header("retry-after-ms", header("The same in milliseconds."))
}

/// Headers of every response.
fn marked(response: ResponseBuilder) -> ResponseBuilder {
    response.header("x-typesafe-request-id", header("The request's own id, or a new one.")).header(
        "server-timing",
        header("`app;dur=` milliseconds in the process; then the stages of an answer."),
    )
}

fn header(description: &str) -> Header {
    let mut header = Header::new(ObjectBuilder::new().schema_type(Type::String).build());
    header.description = Some(description.to_owned());
    header
}

fn form(shape: Shape) -> Schema {
    let detail: RefOr<Schema> = match shape {
        Shape::List => ArrayBuilder::new().items(Ref::from_schema_name("ErrorItem")).build().into(),
        Shape::Object => Ref::from_schema_name("ErrorObject").into(),
        Shape::Text => ObjectBuilder::new().schema_type(Type::String).build().into(),
    };
    ObjectBuilder::new().property("detail", detail).required("detail").build().into()
}

fn secured(operation: OperationBuilder, keyed: bool) -> OperationBuilder {
    if keyed {
        operation.security(SecurityRequirement::new("key", std::iter::empty::<String>()))
    } else {
        operation
    }
}
