//! Owns a connection's patience: how long the headers of a request may take once they have begun, and how long an answer
//! may stay unread. Knows bytes, not HTTP.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// What the connection's requests tell its socket.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    /// Requests whose headers have been read, total.
    heads: AtomicU64,
    /// Requests in work, and unread bodies being thrown away.
    working: AtomicUsize,
}

/// Held while bytes on the connection belong to a request whose headers have been read.
#[derive(Debug)]
pub(crate) struct Working(Arc<Activity>);

impl Working {
    /// Begins a request.
    pub(crate) fn begin(activity: &Arc<Activity>) -> Self {
        activity.heads.fetch_add(1, Ordering::Relaxed);
        activity.working.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Clone for Working {
    fn clone(&self) -> Self {
        self.0.working.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.working.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A stream that gives up on slow headers and slow readers.
pub(crate) struct Patient<S> {
    stream: S,
    activity: Arc<Activity>,
    head_timeout: Duration,
    write_timeout: Duration,
    /// Ends the patience with the headers that began after so many others.
    head: Option<(u64, Pin<Box<Sleep>>)>,
    /// Ends the patience with a reader.
    write: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    pub(crate) fn new(
        stream: S,
        activity: Arc<Activity>,
        head_timeout: Duration,
        write_timeout: Duration,
    ) -> Self {
        Self { stream, activity, head_timeout, write_timeout, head: None, write: None }
    }

    /// Bytes came: if they begin a request's headers, the clock starts.
    fn began(&mut self) {
        let heads = self.activity.heads.load(Ordering::Relaxed);
        let idle = self.activity.working.load(Ordering::Relaxed) == 0;
        if idle && self.head.as_ref().is_none_or(|(before, _)| *before != heads) {
            self.head = Some((heads, Box::pin(tokio::time::sleep(self.head_timeout))));
        }
    }

    /// No bytes came: whether the clock of unfinished headers has run out.
    fn head_expired(&mut self, cx: &mut Context<'_>) -> bool {
        let heads = self.activity.heads.load(Ordering::Relaxed);
        match &mut self.head {
            Some((before, clock)) if *before == heads => clock.as_mut().poll(cx).is_ready(),
            _ => {
                self.head = None;
                false
            }
        }
    }

    /// Turns waiting for a reader into an error when it has lasted too long.
    fn patience<T>(&mut self, cx: &mut Context<'_>, written: Poll<Result<T>>) -> Poll<Result<T>> {
        if written.is_ready() {
            self.write = None;
            return written;
        }
        let timeout = self.write_timeout;
        let clock = self.write.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        match clock.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(timed_out("the client did not read its answer"))),
            Poll::Pending => written,
        }
    }
}

fn timed_out(what: &'static str) -> Error {
    Error::new(ErrorKind::TimedOut, what)
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            this.began();
        } else if read.is_pending() && this.head_expired(cx) {
            return Poll::Ready(Err(timed_out("the client did not finish its headers")));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.patience(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.patience(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.patience(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        // Of a TLS stream this writes too, and may wait for the reader.
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.patience(cx, shut)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::from_millis(5);

    fn pair(head: Duration, write: Duration) -> (Patient<DuplexStream>, DuplexStream, Arc<Activity>) {
        let (near, far) = duplex(4);
        let activity = Arc::new(Activity::default());
        (Patient::new(near, Arc::clone(&activity), head, write), far, activity)
    }

    #[tokio::test]
    async fn headers_that_began_must_end() {
        let (mut near, mut far, _) = pair(SHORT, LONG);
        far.write_all(b"GE").await.unwrap();
        let error = near.read_exact(&mut [0; 3]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn silence_before_between_and_within_requests_is_no_unfinished_header() {
        let (mut near, mut far, activity) = pair(SHORT, LONG);
        // Before any byte.
        assert!(tokio::time::timeout(SHORT * 4, near.read(&mut [0; 1])).await.is_err());
        // A request whose headers have been read: its body may be slow.
        far.write_all(b"ab").await.unwrap();
        near.read_exact(&mut [0; 2]).await.unwrap();
        let working = Working::begin(&activity);
        assert!(tokio::time::timeout(SHORT * 4, near.read(&mut [0; 1])).await.is_err());
        far.write_all(b"c").await.unwrap();
        near.read_exact(&mut [0; 1]).await.unwrap();
        let rest = working.clone();
        drop(working);
        assert!(tokio::time::timeout(SHORT * 4, near.read(&mut [0; 1])).await.is_err());
        drop(rest);
        // Between requests.
        assert!(tokio::time::timeout(SHORT * 4, near.read(&mut [0; 1])).await.is_err());
        // And then the next request's headers are timed again.
        far.write_all(b"d").await.unwrap();
        assert_eq!(near.read_exact(&mut [0; 2]).await.unwrap_err().kind(), ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn answers_must_be_read() {
        let (mut near, _far, _) = pair(LONG, SHORT);
        let error = near.write_all(b"more than four bytes").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }
}
