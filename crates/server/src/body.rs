//! Owns the way of body bytes: which kinds are read at all, how many, for how long, and how they are decompressed. Knows
//! nothing of what they mean.

use std::io::Read;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
use crate::socket::Working;

/// Largest window of a zstd frame that is decoded, whatever the limit of bodies: 2 to this many bytes.
const MAX_WINDOW_LOG: u32 = 27;
/// Smallest limit on windows, so that small limits on bodies do not refuse ordinary frames.
const MIN_WINDOW_LOG: u32 = 21;

/// How a body is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Identity,
    Gzip,
    Zstd,
}

/// Decides by the headers alone whether a body can be read.
pub(crate) fn inspect(headers: &HeaderMap) -> Result<Encoding, ApiError> {
    let content_type = media_type(headers);
    if content_type.as_deref().is_some_and(|media| media.starts_with("multipart/")) {
        return Err(ApiError::Multipart);
    }
    let encoding = encoding(headers)?;
    let json = |media: &str| {
        media.strip_prefix("application/").is_some_and(|kind| kind == "json" || kind.ends_with("+json"))
    };
    if content_type.as_deref().is_some_and(json) { Ok(encoding) } else { Err(ApiError::ContentType) }
}

/// Type and subtype in lower case, without parameters.
fn media_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next()?.trim().to_ascii_lowercase())
}

fn encoding(headers: &HeaderMap) -> Result<Encoding, ApiError> {
    let mut values = headers.get_all(header::CONTENT_ENCODING).iter();
    let Some(value) = values.next() else { return Ok(Encoding::Identity) };
    let name = value.as_bytes().trim_ascii();
    let known = [("identity", Encoding::Identity), ("gzip", Encoding::Gzip), ("zstd", Encoding::Zstd)];
    let found = known.into_iter().find(|(known, _)| name.eq_ignore_ascii_case(known.as_bytes()));
    match (found, values.next()) {
        (Some((_, encoding)), None) => Ok(encoding),
        // An unknown one, or one on top of another.
        _ => Err(ApiError::Encoding),
    }
}

/// A body in memory, with its share of the memory for bodies.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) bytes: Vec<u8>,
    _memory: Option<OwnedSemaphorePermit>,
}

/// Reads a whole body, at most `limit` bytes of it, until the deadline.
pub(crate) async fn read(
    body: Body,
    limit: usize,
    memory: &Arc<Semaphore>,
    deadline: Instant,
) -> Result<Held, ApiError> {
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::BodyTooLarge { limit });
    }
    tokio::time::timeout_at(deadline.into(), collect(body, limit, memory))
        .await
        .map_err(|_| ApiError::SlowBody)?
}

async fn collect(mut body: Body, limit: usize, memory: &Arc<Semaphore>) -> Result<Held, ApiError> {
    let mut held = Held { bytes: Vec::new(), _memory: None };
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::IncompleteBody)?;
        let Ok(chunk) = frame.into_data() else { continue };
        if chunk.len() > limit - held.bytes.len() {
            return Err(ApiError::BodyTooLarge { limit });
        }
        // Memory is taken as bytes arrive: who only announces a large body takes none.
        let more = u32::try_from(chunk.len()).map_err(|_| ApiError::BodyMemory)?;
        let more = Arc::clone(memory).try_acquire_many_owned(more).map_err(|_| ApiError::BodyMemory)?;
        match &mut held._memory {
            Some(all) => all.merge(more),
            none => *none = Some(more),
        }
        held.bytes.extend_from_slice(&chunk);
    }
    Ok(held)
}

/// Decompresses a body to at most `limit` bytes. Blocking.
pub(crate) fn decode(bytes: &[u8], encoding: Encoding, limit: usize) -> Result<Vec<u8>, ApiError> {
    match encoding {
        // No body at all is the processor's to refuse, whatever it would have been compressed with.
        _ if bytes.is_empty() => Ok(Vec::new()),
        Encoding::Identity => Ok(bytes.to_vec()),
        Encoding::Gzip => read_at_most(flate2::read::MultiGzDecoder::new(bytes), limit, "gzip"),
        Encoding::Zstd => decode_zstd(bytes, limit),
    }
}

fn decode_zstd(bytes: &[u8], limit: usize) -> Result<Vec<u8>, ApiError> {
    // A frame that says how much it holds is refused before anything is decoded.
    if let Ok(Some(size)) = zstd::zstd_safe::get_frame_content_size(bytes)
        && size > limit as u64
    {
        return Err(ApiError::BodyTooLarge { limit });
    }
    let corrupt = || ApiError::CorruptBody { encoding: "zstd" };
    let mut decoder = zstd::stream::read::Decoder::with_buffer(bytes).map_err(|_| corrupt())?;
    // A window larger than the limit can only belong to a body larger than the limit.
    let window = limit.max(1).ilog2() + 1;
    decoder.window_log_max(window.clamp(MIN_WINDOW_LOG, MAX_WINDOW_LOG)).map_err(|_| corrupt())?;
    read_at_most(decoder, limit, "zstd")
}

fn read_at_most(decoder: impl Read, limit: usize, encoding: &'static str) -> Result<Vec<u8>, ApiError> {
    let mut out = Vec::new();
    decoder
        .take((limit as u64).saturating_add(1))
        .read_to_end(&mut out)
        .map_err(|_| ApiError::CorruptBody { encoding })?;
    if out.len() > limit { Err(ApiError::BodyTooLarge { limit }) } else { Ok(out) }
}

/// How much of an unread body is thrown away, so that its sender sees the answer instead of a reset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LingerLimits {
    pub(crate) bytes: usize,
    pub(crate) time: Duration,
}

/// A request's body as it comes in. Dropped before its end, the rest is read and thrown away within limits: closing a
/// connection with unread bytes would reset it, and the sender might never see the answer.
pub(crate) struct Lingering {
    incoming: Option<Incoming>,
    /// The sender waits for a go-ahead that it will not get: there are no unread bytes.
    waits: bool,
    limits: LingerLimits,
    working: Working,
}

impl Lingering {
    pub(crate) fn new(
        incoming: Incoming,
        headers: &HeaderMap,
        limits: LingerLimits,
        working: Working,
    ) -> Self {
        let expect = headers.get(header::EXPECT).map(|value| value.as_bytes());
        let waits = expect.is_some_and(|value| value.eq_ignore_ascii_case(b"100-continue"));
        Self { incoming: Some(incoming), waits, limits, working }
    }
}

impl HttpBody for Lingering {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.waits = false;
        let Some(incoming) = &mut self.incoming else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(incoming).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            self.incoming = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        let Some(incoming) = self.incoming.take().filter(|incoming| !incoming.is_end_stream()) else {
            return;
        };
        if let (false, Ok(runtime)) = (self.waits, tokio::runtime::Handle::try_current()) {
            runtime.spawn(throw_away(incoming, self.limits, self.working.clone()));
        }
    }
}

async fn throw_away(mut incoming: Incoming, limits: LingerLimits, working: Working) {
    let rest = async {
        let mut bytes = 0;
        while let Some(Ok(frame)) = incoming.frame().await {
            bytes += frame.data_ref().map_or(0, Bytes::len);
            if bytes > limits.bytes {
                break;
            }
        }
    };
    // Whatever is left then is reset with the connection.
    let _ = tokio::time::timeout(limits.time, rest).await;
    drop(working);
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    /// Content type, content encodings, and what they decide.
    type HeaderCase<'a> = (Option<&'a str>, &'a [&'a str], Result<Encoding, ApiError>);

    use super::*;

    #[test]
    fn headers_decide_what_is_read() {
        let cases: [HeaderCase<'_>; 17] = [
            (Some("application/json"), &[], Ok(Encoding::Identity)),
            (Some("Application/JSON; charset=utf-8"), &[], Ok(Encoding::Identity)),
            (Some("application/vnd.x+json"), &["identity"], Ok(Encoding::Identity)),
            (Some("application/json"), &["ZSTD"], Ok(Encoding::Zstd)),
            (Some("application/json"), &[" gzip"], Ok(Encoding::Gzip)),
            (Some("application/json"), &["br"], Err(ApiError::Encoding)),
            (Some("application/json"), &["gzip, zstd"], Err(ApiError::Encoding)),
            (Some("application/json"), &["gzip", "zstd"], Err(ApiError::Encoding)),
            (Some("application/json"), &[""], Err(ApiError::Encoding)),
            (None, &[], Err(ApiError::ContentType)),
            (Some("text/plain"), &[], Err(ApiError::ContentType)),
            (Some("text/json"), &[], Err(ApiError::ContentType)),
            (Some("application/jsonx"), &[], Err(ApiError::ContentType)),
            (Some("application/x-www-form-urlencoded"), &[], Err(ApiError::ContentType)),
            (Some(""), &[], Err(ApiError::ContentType)),
            (Some("multipart/form-data; boundary=x"), &[], Err(ApiError::Multipart)),
            (Some("Multipart/mixed"), &["br"], Err(ApiError::Multipart)),
        ];
        for (content_type, encodings, expected) in cases {
            let mut headers = HeaderMap::new();
            if let Some(value) = content_type {
                headers.insert(header::CONTENT_TYPE, value.parse().unwrap());
            }
            for value in encodings {
                headers.append(header::CONTENT_ENCODING, value.parse().unwrap());
            }
            assert_eq!(inspect(&headers), expected, "{content_type:?} {encodings:?}");
        }
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn streamed_zstd(bytes: &[u8]) -> Vec<u8> {
        // A stream does not know its size beforehand, so its header cannot say it.
        zstd::stream::encode_all(bytes, 3).unwrap()
    }

    #[test]
    fn compressed_bodies_come_back_up_to_the_limit() {
        let text = b"0123456789".repeat(500);
        for (encoding, packed) in [
            (Encoding::Identity, text.clone()),
            (Encoding::Gzip, gzip(&text)),
            (Encoding::Zstd, streamed_zstd(&text)),
            (Encoding::Zstd, zstd::bulk::compress(&text, 3).unwrap()),
        ] {
            assert_eq!(decode(&packed, encoding, text.len()).unwrap(), text, "{encoding:?}");
            if encoding != Encoding::Identity {
                let limit = text.len() - 1;
                assert_eq!(decode(&packed, encoding, limit), Err(ApiError::BodyTooLarge { limit }));
                let cut = decode(&packed[..packed.len() - 1], encoding, text.len());
                assert!(matches!(cut, Err(ApiError::CorruptBody { .. })), "{encoding:?}: {cut:?}");
                let garbage = decode(b"not compressed at all", encoding, 100);
                assert!(matches!(garbage, Err(ApiError::CorruptBody { .. })));
            }
        }
    }

    #[test]
    fn bombs_do_not_go_off() {
        let limit = 1 << 20;
        let zeros = vec![0; 64 << 20];
        for (encoding, packed) in [
            (Encoding::Gzip, gzip(&zeros)),
            (Encoding::Zstd, streamed_zstd(&zeros)),
            (Encoding::Zstd, zstd::bulk::compress(&zeros, 19).unwrap()),
        ] {
            assert_eq!(
                decode(&packed, encoding, limit),
                Err(ApiError::BodyTooLarge { limit }),
                "{encoding:?}"
            );
        }
    }

    #[tokio::test]
    async fn memory_for_bodies_is_bounded_and_given_back() {
        let memory = Arc::new(Semaphore::new(10));
        let soon = || Instant::now() + Duration::from_secs(60);
        let first = read(Body::from("12345678"), 100, &memory, soon()).await.unwrap();
        assert_eq!(memory.available_permits(), 2);
        assert_eq!(read(Body::from("123"), 100, &memory, soon()).await.unwrap_err(), ApiError::BodyMemory);
        drop(first);
        assert_eq!(memory.available_permits(), 10);
        let error = read(Body::from("1234"), 3, &memory, soon()).await.unwrap_err();
        assert_eq!(error, ApiError::BodyTooLarge { limit: 3 });
        assert_eq!(memory.available_permits(), 10);
    }
}
