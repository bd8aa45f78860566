//! Owns what becomes of a body between the socket and the processor: media type, encoding, and a bound on both sizes.

use std::io::Read;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use processor::{RequestError, Violation};

use crate::error::ApiError;

/// Reads and decodes a body of at most `limit` bytes, before and after decoding.
pub(crate) async fn read(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let text = |name| {
        headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("").trim().to_ascii_lowercase()
    };
    let media = text(header::CONTENT_TYPE);
    let media = media.split(';').next().unwrap_or("").trim();
    if media.starts_with("multipart/") {
        return Err(ApiError::Unsupported("Images are not supported: send application/json."));
    }
    let declared = text(header::CONTENT_LENGTH).parse::<usize>().unwrap_or(0);
    if declared > limit {
        return Err(ApiError::TooLarge(limit));
    }
    let encoding = text(header::CONTENT_ENCODING);
    if !matches!(encoding.as_str(), "" | "identity" | "zstd" | "gzip") {
        return Err(ApiError::Unsupported("Content-Encoding must be identity, gzip or zstd."));
    }
    let bytes = axum::body::to_bytes(body, limit).await.map_err(|error| {
        // The only errors are a body past the limit and a connection that broke.
        if std::error::Error::source(&error).is_some_and(|source| source.to_string().contains("length limit"))
        {
            ApiError::TooLarge(limit)
        } else {
            ApiError::Unreadable
        }
    })?;
    let json = media == "application/json" || (media.starts_with("application/") && media.ends_with("+json"));
    if !json && !bytes.is_empty() {
        let message =
            "Input should be a valid dictionary or object to extract fields from: send application/json";
        return Err(ApiError::Request(RequestError::Violations(vec![Violation {
            kind: "model_attributes_type",
            path: Vec::new(),
            message: message.to_owned(),
            input: None,
        }])));
    }
    match encoding.as_str() {
        "zstd" => {
            decoded(zstd::stream::read::Decoder::new(&bytes[..]).map_err(|_| ApiError::Unreadable)?, limit)
        }
        "gzip" => decoded(flate2::read::MultiGzDecoder::new(&bytes[..]), limit),
        _ => Ok(bytes),
    }
}

/// The bound is on what comes out: a kilobyte can expand to gigabytes.
fn decoded(reader: impl Read, limit: usize) -> Result<Bytes, ApiError> {
    let mut bytes = Vec::new();
    reader.take(limit as u64 + 1).read_to_end(&mut bytes).map_err(|_| ApiError::Unreadable)?;
    if bytes.len() > limit { Err(ApiError::TooLarge(limit)) } else { Ok(bytes.into()) }
}
