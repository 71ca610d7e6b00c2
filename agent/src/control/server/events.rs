//! `GET /v1/events`: kept events, and those to come, as JSON lines.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use tokio::sync::{
    OwnedSemaphorePermit,
    broadcast::error::{RecvError, TryRecvError},
    mpsc,
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};

use crate::control::{
    EventFeed,
    api::{Event, EventRecord, Timestamp},
};

/// Lines are sent in pieces of about this many bytes.
const PIECE: usize = 16 * 1024;

/// The kept events and no more.
pub fn kept(feed: &EventFeed, all: bool) -> Body {
    let mut lines = Vec::new();
    for record in &feed.kept {
        push(&mut lines, record, all);
    }
    Body::from(lines)
}

/// The kept events, then those to come until the client goes, or does not keep up: then a last
/// line of kind `loss` says so. `slot` is given back at the end.
pub fn follow(feed: EventFeed, all: bool, slot: OwnedSemaphorePermit) -> Body {
    let (pieces, body) = mpsc::channel(1);
    tokio::spawn(async move {
        // None: the client is gone.
        let _: Option<()> = forward(feed, all, &pieces).await;
        drop(slot);
    });
    Body::from_stream(ReceiverStream::new(body).map(Ok::<Bytes, std::convert::Infallible>))
}

async fn forward(feed: EventFeed, all: bool, pieces: &mpsc::Sender<Bytes>) -> Option<()> {
    let EventFeed { kept, mut coming } = feed;
    let mut lines = Vec::new();
    for record in kept {
        push(&mut lines, &record, all);
        if lines.len() >= PIECE {
            pieces.send(std::mem::take(&mut lines).into()).await.ok()?;
        }
    }
    loop {
        // Whatever is there goes in one piece; only then is there a wait.
        let ended = loop {
            if lines.len() >= PIECE {
                break None;
            }
            match coming.try_recv() {
                Ok(record) => push(&mut lines, &record, all),
                Err(TryRecvError::Empty) => break None,
                Err(TryRecvError::Closed) => break Some(RecvError::Closed),
                Err(TryRecvError::Lagged(lost)) => break Some(RecvError::Lagged(lost)),
            }
        };
        if !lines.is_empty() {
            pieces.send(std::mem::take(&mut lines).into()).await.ok()?;
        }
        let next = match ended {
            Some(ended) => Err(ended),
            None => tokio::select! {
                next = coming.recv() => next,
                () = pieces.closed() => return None,
            },
        };
        match next {
            Ok(record) => push(&mut lines, &record, all),
            Err(RecvError::Closed) => return Some(()),
            Err(RecvError::Lagged(lost)) => {
                let note = too_slow(lost);
                tracing::warn!(lost, "a reader of events was too slow and is dropped");
                push(&mut lines, &note, true);
                return pieces.send(lines.into()).await.ok();
            }
        }
    }
}

fn too_slow(lost: u64) -> Arc<EventRecord> {
    Arc::new(EventRecord {
        time: Timestamp::now(),
        event: Event::Loss {
            lost,
            message: "this reader of events was too slow and is cut off here; the agent lost \
                      nothing"
                .to_owned(),
        },
    })
}

fn push(lines: &mut Vec<u8>, record: &Arc<EventRecord>, all: bool) {
    if record.event.only_with_all() && !all {
        return;
    }
    let before = lines.len();
    match serde_json::to_writer(&mut *lines, record.as_ref()) {
        Ok(()) => lines.push(b'\n'),
        Err(error) => {
            lines.truncate(before);
            tracing::error!(%error, kind = record.event.kind(), "an event does not fit into JSON");
        }
    }
}
