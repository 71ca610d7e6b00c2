//! Who gets a place on the TCP listener, which any program of the host can reach.
//!
//! A connection needs one of the places only once its request is there, so that idle connections
//! take none. Those that have sent none yet are limited in number, too: one more, and the oldest of
//! them is cut off. Probes need no place at all: however busy the listener is, the agent is not
//! taken for dead.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{
    Extension,
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use tokio::{
    sync::{OnceCell, OwnedSemaphorePermit, Semaphore},
    task::AbortHandle,
};

use crate::control::api::ApiError;

/// A connection, from its accept to its end.
pub struct Arrival {
    places: Arc<Semaphore>,
    /// Its request is there.
    asked: AtomicBool,
    /// Given back with the connection, not with the answer: the client has yet to read that.
    place: OnceCell<OwnedSemaphorePermit>,
}

impl Arrival {
    /// A connection that has sent nothing yet.
    pub fn new(places: &Arc<Semaphore>) -> Arc<Self> {
        Arc::new(Self {
            places: Arc::clone(places),
            asked: AtomicBool::new(false),
            place: OnceCell::new(),
        })
    }

    /// Its request is there; false when there is no place for it.
    fn enter(&self, path: &str) -> bool {
        self.asked.store(true, Ordering::Release);
        if matches!(path, "/healthz" | "/readyz") {
            return true;
        }
        match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => self.place.set(place).is_ok(),
            Err(_) => false,
        }
    }
}

/// Lets a request in, or answers that there is no place for it.
pub async fn enter(
    Extension(arrival): Extension<Arc<Arrival>>,
    request: Request,
    next: Next,
) -> Response {
    if arrival.enter(request.uri().path()) {
        return next.run(request).await;
    }
    ApiError::Unavailable("too many connections to the agent; try again".to_owned()).into_response()
}

/// The connections whose request is not there yet, oldest first.
pub struct Waiting {
    connections: VecDeque<(Weak<Arrival>, AbortHandle)>,
    limit: usize,
}

impl Waiting {
    /// At most `limit`.
    pub fn new(limit: usize) -> Self {
        Self {
            connections: VecDeque::new(),
            limit: limit.max(1),
        }
    }

    /// One more, served by `task`; cuts the oldest off when there are too many.
    pub fn push(&mut self, arrival: Weak<Arrival>, task: AbortHandle) {
        if self.connections.len() >= self.limit {
            self.connections.retain(|(arrival, _)| {
                arrival
                    .upgrade()
                    .is_some_and(|arrival| !arrival.asked.load(Ordering::Acquire))
            });
        }
        if self.connections.len() >= self.limit
            && let Some((_, oldest)) = self.connections.pop_front()
        {
            oldest.abort();
        }
        self.connections.push_back((arrival, task));
    }
}
