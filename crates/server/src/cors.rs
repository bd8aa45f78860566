//! Owns which web pages may read answers: how origins are written, and the layer that tells browsers.

use std::time::Duration;

use axum::http::{HeaderValue, Method};
use tower_http::cors::{AllowHeaders, AllowOrigin, Any as Every, CorsLayer};

use crate::observe::{REQUEST_ID, SERVER_TIMING};

/// Which web pages may read answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cors {
    /// Pages of any origin, as the reference service allows.
    Any,
    /// Pages of these origins, as [`Cors::parse`] makes them.
    Origins(Vec<HeaderValue>),
    /// None: no CORS header is ever sent.
    #[default]
    Off,
}

/// A text is no origin as browsers send it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{origin:?} is no origin: {reason}; expected scheme://host or scheme://host:port, or * alone")]
pub struct OriginError {
    /// The text.
    pub origin: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl Cors {
    /// What these origins allow: none means off, `*` alone means any. Others are compared byte by byte with what a browser
    /// sends, so a spelling that no browser sends is an error and not an origin that never matches.
    ///
    /// # Errors
    /// [`OriginError`] for the first that is no origin.
    pub fn parse<T: AsRef<str>>(origins: &[T]) -> Result<Self, OriginError> {
        match origins {
            [] => return Ok(Self::Off),
            [any] if any.as_ref() == "*" => return Ok(Self::Any),
            _ => {}
        }
        let parsed = origins.iter().map(AsRef::as_ref).map(|origin| {
            let wrong = |reason| OriginError { origin: origin.to_owned(), reason };
            check(origin).map_err(wrong)?;
            HeaderValue::from_str(origin).map_err(|_| wrong("it cannot be in a header"))
        });
        Ok(Self::Origins(parsed.collect::<Result<_, _>>()?))
    }

    /// The layer, if anything is allowed.
    pub(crate) fn layer(&self) -> Option<CorsLayer> {
        let origins: AllowOrigin = match self {
            Self::Off => return None,
            Self::Any => Every.into(),
            Self::Origins(origins) => origins.clone().into(),
        };
        let layer = CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([REQUEST_ID, SERVER_TIMING])
            .max_age(Duration::from_secs(600));
        Some(layer)
    }
}

/// Whether a browser would send this: scheme, host, and a port that is not the scheme's own.
fn check(origin: &str) -> Result<(), &'static str> {
    if origin == "*" {
        return Err("* stands for all and allows no other beside it");
    }
    if origin.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err("browsers send it in lower case");
    }
    let (scheme, rest) = origin.split_once("://").ok_or("it has no scheme")?;
    let within = |text: &str, others: &[u8]| {
        text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || others.contains(&byte))
    };
    if !scheme.starts_with(|first: char| first.is_ascii_lowercase()) || !within(scheme, b"+-.") {
        return Err("its scheme is none");
    }
    if rest.contains(['/', '?', '#']) {
        return Err("it has a path");
    }
    let (host, port) = match rest.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']').ok_or("its host is none")?;
            address.parse::<std::net::Ipv6Addr>().map_err(|_| "its host is none")?;
            // Checked already; what lies between the brackets is no host name.
            ("v6", port)
        }
        None => rest.split_at(rest.find(':').unwrap_or(rest.len())),
    };
    if host.is_empty() || !within(host, b"-._") {
        return Err("its host is none");
    }
    if port.is_empty() {
        return Ok(());
    }
    let digits = port.strip_prefix(':').unwrap_or("");
    let number = digits.parse::<u16>().ok().filter(|number| number.to_string() == digits && *number > 0);
    match (scheme, number) {
        (_, None) => Err("its port is none"),
        ("https", Some(443)) | ("http", Some(80)) => Err("browsers leave out the scheme's own port"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_scheme_host_and_port() {
        for good in [
            "https://app.example",
            "http://localhost:3000",
            "http://127.0.0.1:8080",
            "http://[::1]:8080",
            "https://[::1]",
            "chrome-extension://abcdef",
            "https://xn--bcher-kva.example:8443",
        ] {
            assert_eq!(Cors::parse(&[good]), Ok(Cors::Origins(vec![good.parse().unwrap()])), "{good}");
        }
        for bad in [
            "",
            "null",
            "app.example",
            "https://",
            "://app.example",
            "https://app.example/",
            "https://app.example/path",
            "https://app.example?q",
            "https://user@app.example",
            "https://*.example",
            "https://App.example",
            "https://app.example:443",
            "http://app.example:80",
            "https://app.example:",
            "https://app.example:0",
            "https://app.example:080",
            "https://app.example:65536",
            "https://app.example:+1",
            "https://[::1",
            "https://[no]",
            "https://[::1]8080",
            "https://a b",
            "https://bücher.example",
            " https://app.example",
        ] {
            let error = Cors::parse(&[bad]).unwrap_err();
            assert_eq!(error.origin, bad);
            assert!(error.to_string().contains("expected scheme://host"), "{error}");
        }
    }

    #[test]
    fn the_star_stands_alone_and_nothing_is_off() {
        assert_eq!(Cors::parse::<&str>(&[]), Ok(Cors::Off));
        assert_eq!(Cors::parse(&["*"]), Ok(Cors::Any));
        assert!(Cors::parse(&["https://app.example", "*"]).is_err());
        assert!(Cors::parse(&["*", "*"]).is_err());
    }
}
