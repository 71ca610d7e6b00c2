//! Answers that may be tens of megabytes: how many there are at a time, and when their memory goes
//! back to the system.
//!
//! A client that does not read keeps its answer in memory until it is cut off, so what counts is
//! not how many ask but how many different bytes are kept: a page of metrics is put together once
//! and shared by all who ask within a second, and a turn is needed for as long as any byte of an
//! answer has not reached the system.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::body::Bytes;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

use super::Limits;
use crate::{control::api::ApiError, daemon::memory};

/// An answer above this size, bytes, is given back to the system at once when it is done with.
const LARGE: usize = 1024 * 1024;

/// Bytes whose memory goes back to the system with the last that shares them.
struct Returned(Vec<u8>);

impl AsRef<[u8]> for Returned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Returned {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.0);
        let large = bytes.len() > LARGE;
        drop(bytes);
        if large {
            memory::give_back();
        }
    }
}

/// An answer to be shared or sent.
pub fn returned(bytes: Vec<u8>) -> Bytes {
    Bytes::from_owner(Returned(bytes))
}

/// An answer on its way, with the turn that it needs.
struct Sending {
    bytes: Bytes,
    _turn: Turn,
}

impl AsRef<[u8]> for Sending {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The right to have one large answer.
pub type Turn = OwnedSemaphorePermit;

/// How many large answers of a kind may be on their way.
pub struct Turns {
    free: Arc<Semaphore>,
    limit: usize,
    patience: Duration,
    what: &'static str,
}

impl Turns {
    /// At most `limit` at a time; more wait for `patience`. `what` says of what, in the plural.
    pub fn new(limit: usize, patience: Duration, what: &'static str) -> Self {
        Self {
            free: Arc::new(Semaphore::new(limit)),
            limit,
            patience,
            what,
        }
    }

    /// Waits for a turn, within reason.
    ///
    /// # Errors
    /// [`ApiError::Unavailable`] when none has become free.
    pub async fn take(&self) -> Result<Turn, ApiError> {
        let turn = Arc::clone(&self.free).acquire_owned();
        match tokio::time::timeout(self.patience, turn).await {
            Ok(Ok(turn)) => Ok(turn),
            Ok(Err(_)) | Err(_) => Err(ApiError::Unavailable(format!(
                "busy: {} {} are being sent already; try again",
                self.limit, self.what
            ))),
        }
    }
}

/// The bytes as a body that keeps `turn` until the last of them is sent, or the client is gone.
pub fn body(bytes: Bytes, turn: Turn) -> Bytes {
    // The turn belongs to the bytes and not to the body: a body ends when its bytes are queued.
    Bytes::from_owner(Sending { bytes, _turn: turn })
}

/// The page of metrics, for all who ask within a short time.
pub struct Page {
    /// Locked while the page is put together: one at a time.
    pub(super) kept: Mutex<Option<(Instant, Bytes)>>,
    keep: Duration,
    small: usize,
}

impl Page {
    /// A page that is shared for as long as [`Limits::page`] says.
    pub fn new(limits: &Limits) -> Arc<Self> {
        Arc::new(Self {
            kept: Mutex::default(),
            keep: limits.page,
            small: limits.page_bytes,
        })
    }

    /// The page as it is kept, if it is large, or a new one from `make`: a small one costs little,
    /// and whoever asks again after a change sees the change.
    ///
    /// # Errors
    /// What `make` says.
    pub async fn get(
        self: &Arc<Self>,
        make: impl Future<Output = Result<String, ApiError>>,
    ) -> Result<Bytes, ApiError> {
        let mut kept = self.kept.lock().await;
        if let Some((since, page)) = &*kept
            && since.elapsed() < self.keep
            && page.len() >= self.small
        {
            return Ok(page.clone());
        }
        // Let go of the old one first: two are twice the memory.
        *kept = None;
        let page = returned(make.await?.into_bytes());
        let since = Instant::now();
        *kept = Some((since, page.clone()));
        drop(kept);
        let this = Arc::downgrade(self);
        let keep = self.keep;
        tokio::spawn(async move {
            tokio::time::sleep(keep).await;
            if let Some(this) = this.upgrade() {
                let mut kept = this.kept.lock().await;
                if kept.as_ref().is_some_and(|(made, _)| *made == since) {
                    *kept = None;
                }
            }
        });
        Ok(page)
    }
}
