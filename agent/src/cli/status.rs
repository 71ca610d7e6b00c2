//! `status` and `events`.

use std::io::Write;

use super::{
    Failure, detail, event_text,
    output::Output,
    table::{self, Style},
    units::clean,
};
use crate::control::{
    api::{EventRecord, StatusEnvelope, Timestamp, parse_destination},
    client::{Client, encode},
};

/// How the row of all destinations without one of their own is asked for.
const OTHER: &str = "other";

/// Shows all destinations, or one; fails when that one was never seen and nobody has given an order for
/// it.
pub async fn status(
    client: &Client,
    destination: Option<&str>,
    json: bool,
    out: &mut Output<'_>,
) -> Result<(), Failure> {
    if let Some(destination) = destination.filter(|of| *of != OTHER) {
        parse_destination(destination).map_err(Failure::Usage)?;
    }
    let target = match destination {
        Some(destination) => format!("/v1/destinations/{}", encode(destination)),
        None => "/v1/destinations".to_owned(),
    };
    let body = client.get(&target).await?;
    let envelope: StatusEnvelope = serde_json::from_slice(&body)?;
    let seen = destination.is_none() || !envelope.destinations.is_empty();
    let ordered = !envelope.orders.is_empty();
    if json {
        // As it came: keys of a newer agent are not lost.
        out.write_all(&body)?;
        out.flush()?;
    } else if seen || ordered {
        let style = Style {
            colour: out.colour,
            width: out.width,
            now: Timestamp::now(),
        };
        let text = match destination {
            Some(_) if !seen => {
                let heading = detail::details(&envelope, style);
                format!("{heading}\nNo connect seen yet.\n")
            }
            Some(_) => detail::details(&envelope, style),
            None => table::table(&envelope, style),
        };
        out.write_all(text.as_bytes())?;
    }
    match destination {
        Some(destination) if !seen && !ordered => Err(Failure::Said(format!(
            "{}: no such destination seen; `backstop status` lists those that were",
            clean(destination)
        ))),
        _ => Ok(()),
    }
}

/// Prints events, one a line, each as soon as it is there.
pub async fn events(
    client: &Client,
    follow: bool,
    all: bool,
    json: bool,
    out: &mut Output<'_>,
) -> Result<(), Failure> {
    let mut pieces = client
        .stream(&format!("/v1/events?follow={follow}&all={all}"))
        .await?;
    let mut rest = Vec::new();
    while let Some(piece) = pieces.next().await? {
        rest.extend_from_slice(&piece);
        let whole = rest
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1);
        for line in rest[..whole].split_inclusive(|byte| *byte == b'\n') {
            print(line, json, out)?;
        }
        out.flush()?;
        rest.drain(..whole);
    }
    if follow {
        return Err(Failure::Said(
            "the stream of events has ended: the agent stopped, or this reader was too slow"
                .to_owned(),
        ));
    }
    Ok(())
}

fn print(line: &[u8], json: bool, out: &mut Output<'_>) -> Result<(), Failure> {
    if !json && let Ok(record) = serde_json::from_slice::<EventRecord>(line) {
        writeln!(out, "{}", event_text::line(&record))?;
    } else {
        // JSON, or a kind that only a newer agent knows: better than nothing.
        out.write_all(line)?;
    }
    Ok(())
}
