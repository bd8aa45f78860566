//! Owns the API keys: how they are kept, named, exchanged, compared and asked for.

use std::sync::{Arc, PoisonError, RwLock};

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::error::ApiError;

/// A key that callers must present as `Authorization: Bearer <key>`. Only its hash is kept.
#[derive(Clone)]
pub struct ApiKey {
    digest: [u8; 32],
    name: Option<Arc<str>>,
}

/// Longest name of a key.
const MAX_NAME: usize = 64;

impl ApiKey {
    /// A key. Spaces around it are not part of it.
    pub fn new(key: &str) -> Self {
        Self::hashed(digest(key.trim().as_bytes()))
    }

    /// A key of which only the SHA-256 is known.
    pub fn hashed(digest: [u8; 32]) -> Self {
        Self { digest, name: None }
    }

    /// The key under a name that request logs show: 1 to 64 of `A-Z a-z 0-9 _ . -`. `None` when the name is none.
    pub fn named(mut self, name: &str) -> Option<Self> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if !(1..=MAX_NAME).contains(&name.len()) || !name.bytes().all(fits) {
            return None;
        }
        self.name = Some(name.into());
        Some(self)
    }

    /// Compares hashes, all of their bytes whatever the first ones say: time tells nothing about the key.
    fn matches(&self, presented: &[u8]) -> bool {
        let presented = digest(presented);
        let difference = self.digest.iter().zip(presented).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(difference) == 0
    }
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

/// The keys in force, of which every path under `/v1` asks for one; none accepts and ignores any. Clones share what
/// [`ApiKeys::replace`] puts in force.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys {
    current: Arc<RwLock<Arc<[ApiKey]>>>,
}

impl From<Vec<ApiKey>> for ApiKeys {
    fn from(keys: Vec<ApiKey>) -> Self {
        Self { current: Arc::new(RwLock::new(keys.into())) }
    }
}

impl ApiKeys {
    /// Puts other keys in force for requests that come later. Whether that was done: a server that asks for a key never
    /// stops asking, nor does one that does not begin to, so both the old and the new keys must be some.
    #[must_use]
    pub fn replace(&self, keys: Vec<ApiKey>) -> bool {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if current.is_empty() || keys.is_empty() {
            return false;
        }
        *current = keys.into();
        true
    }

    /// Whether no key is asked for.
    pub fn is_empty(&self) -> bool {
        self.current().is_empty()
    }

    fn current(&self) -> Arc<[ApiKey]> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether a request may go on, and the name of the key that it presents if that has one.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<Option<Arc<str>>, ApiError> {
        check(&self.current(), headers)
    }
}

/// There is no key, or the request presents one of them. All are compared, whichever fits.
fn check(keys: &[ApiKey], headers: &HeaderMap) -> Result<Option<Arc<str>>, ApiError> {
    if keys.is_empty() {
        return Ok(None);
    }
    let Some(value) = headers.get(header::AUTHORIZATION) else {
        return Err(ApiError::Unauthenticated { missing: true });
    };
    let refused = ApiError::Unauthenticated { missing: false };
    let Some(presented) = bearer(value.as_bytes()) else { return Err(refused) };
    let fitting = keys.iter().fold(None, |found, key| if key.matches(presented) { Some(key) } else { found });
    fitting.map(|key| key.name.clone()).ok_or(refused)
}

/// The token of `Bearer <token>`: the scheme in any case, any number of spaces.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let value = value.trim_ascii();
    let (scheme, token) = value.split_at(value.iter().position(u8::is_ascii_whitespace)?);
    scheme.eq_ignore_ascii_case(b"bearer").then_some(token.trim_ascii())
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_key_opens() {
        let key = ApiKey::new(" sesame\n");
        let opens = ["Bearer sesame", "bearer sesame", "BEARER   sesame  ", "Bearer\tsesame"];
        let refuses = ["sesame", "Bearer", "Bearer ", "Basic sesame", "Bearer sesame2", "Bearer sesam", ""];
        let check = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            let other = ApiKey::new("other");
            let hashed = ApiKey::hashed(Sha256::digest(b"sesame").into());
            let several = check(&[other, hashed], &headers).is_ok();
            assert_eq!(check(std::slice::from_ref(&key), &headers).is_ok(), several);
            several
        };
        assert!(opens.into_iter().all(check));
        assert!(!refuses.into_iter().any(check));
    }

    #[test]
    fn the_key_that_fits_gives_its_name() {
        let named = |key: &str, name: &str| ApiKey::new(key).named(name).unwrap();
        let keys = ApiKeys::from(vec![named("one", "team-a"), ApiKey::new("two"), named("three", "B.c_9")]);
        let name = |key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, format!("Bearer {key}").parse().unwrap());
            keys.check(&headers).map(|name| name.map(|name| name.to_string()))
        };
        assert_eq!(name("one"), Ok(Some("team-a".to_owned())));
        assert_eq!(name("two"), Ok(None));
        assert_eq!(name("three"), Ok(Some("B.c_9".to_owned())));
        assert!(name("team-a").is_err());
        for bad in ["", "a b", "a:b", "é", &"a".repeat(65)] {
            assert!(ApiKey::new("k").named(bad).is_none(), "{bad:?}");
        }
        assert!(ApiKey::new("k").named(&"a".repeat(64)).is_some());
    }

    #[test]
    fn an_exchange_neither_opens_nor_closes_a_server() {
        let keys = ApiKeys::from(vec![ApiKey::new("old")]);
        let shared = keys.clone();
        assert!(!shared.replace(Vec::new()));
        let opens = |key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, format!("Bearer {key}").parse().unwrap());
            keys.check(&headers).is_ok()
        };
        assert!(opens("old") && !opens("new"));
        assert!(shared.replace(vec![ApiKey::new("new")]));
        assert!(opens("new") && !opens("old"));
        let open = ApiKeys::default();
        assert!(open.is_empty() && !open.replace(vec![ApiKey::new("new")]) && open.is_empty());
    }

    #[test]
    fn a_key_is_not_printed() {
        assert!(!format!("{:?}", ApiKey::new("sesame")).contains("sesame"));
    }
}
