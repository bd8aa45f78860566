//! Owns the API key: how it is kept, compared and asked for.

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::error::ApiError;

/// A key that callers must present as `Authorization: Bearer <key>`. Only its hash is kept.
#[derive(Clone)]
pub struct ApiKey {
    digest: [u8; 32],
}

impl ApiKey {
    /// A key. Spaces around it are not part of it.
    pub fn new(key: &str) -> Self {
        Self { digest: digest(key.trim().as_bytes()) }
    }

    /// A key of which only the SHA-256 is known.
    pub fn hashed(digest: [u8; 32]) -> Self {
        Self { digest }
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

/// Whether a request may go on: there is no key, or it presents one of them. All are compared, whichever fits.
pub(crate) fn check(keys: &[ApiKey], headers: &HeaderMap) -> Result<(), ApiError> {
    if keys.is_empty() {
        return Ok(());
    }
    let Some(value) = headers.get(header::AUTHORIZATION) else {
        return Err(ApiError::Unauthenticated { missing: true });
    };
    match bearer(value.as_bytes()) {
        Some(presented) if keys.iter().fold(false, |any, key| any | key.matches(presented)) => Ok(()),
        _ => Err(ApiError::Unauthenticated { missing: false }),
    }
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
    fn a_key_is_not_printed() {
        assert!(!format!("{:?}", ApiKey::new("sesame")).contains("sesame"));
    }
}
