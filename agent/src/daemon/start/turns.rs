//! What the select loop does in its turns, and waits for.

use std::{sync::Arc, time::Duration};

use tokio::{
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};

use crate::daemon::{
    canary::{self, Proof},
    node::Node,
    watch::{Change, Watch},
};

pub(super) fn reload(node: &mut Node) {
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Reloading]);
    // Success and failure are events and log lines already.
    let _ = node.reload(None);
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
}

/// Tells systemd's watchdog that both the loop and the event thread are alive.
pub(super) fn watchdog(node: &Node) {
    if crate::control::Backend::health(&*node.handle).alive {
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
    }
}

/// Has canaries prove enforcement, on a thread of their own: a workload can make them wait.
pub(super) fn prove(node: &Node) -> JoinHandle<Vec<Proof>> {
    let (table, hidden, paths) = (
        Arc::clone(&node.table),
        node.hidden.clone(),
        node.attached(),
    );
    tokio::task::spawn_blocking(move || {
        paths
            .iter()
            .map(|path| canary::prove(&table, &hidden, path))
            .collect()
    })
}

pub(super) async fn finished(proofs: &mut Option<JoinHandle<Vec<Proof>>>) -> Vec<Proof> {
    match proofs {
        // A panic over there proves nothing.
        Some(proofs) => proofs.await.unwrap_or_default(),
        None => std::future::pending().await,
    }
}

pub(super) async fn changed(watch: &mut Option<Watch>) -> Change {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}

pub(super) fn every(period: Duration) -> tokio::time::Interval {
    let mut interval = interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}
