//! `top`: the table of `status`, live.
//!
//! What is on the screen is made by [`frame`], which is pure; the terminal is [`screen`]'s. Here: asking the
//! agent once a second, keys, signals, and what is said when the agent does not answer.

pub(super) mod frame;
mod screen;

use std::{io::Write as _, time::Duration};

use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinHandle,
    time::{Instant, sleep, sleep_until},
};

use super::{Failure, output::Output};
use crate::control::{
    api::{StatusEnvelope, Timestamp},
    client::Client,
};
use frame::{Before, Frame};
use screen::{Key, Screen};

/// How often the agent is asked.
const EVERY: Duration = Duration::from_secs(1);
/// An agent that takes longer to answer (it has very many rows) is asked so much less often: it spends at
/// most a tenth of its time on it.
const REST: u32 = 9;
/// An agent that does not answer within this time is said to be away; it is asked again.
const PATIENCE: Duration = Duration::from_secs(5);

/// What came of a question: the answer, and how long it took.
type Asked = (Result<StatusEnvelope, Failure>, Duration);

/// Shows the table until somebody ends it; where the output is no terminal, once.
pub async fn top(client: &Client, out: &mut Output<'_>) -> Result<(), Failure> {
    if !out.live {
        return once(client, out).await;
    }
    let client = client.clone().with_patience(PATIENCE);
    // An agent that is not there from the begin is an error, as for every other command.
    let (first, took) = ask(&client).await;
    let mut envelope = first?;
    let mut before: Option<Before> = None;
    let mut next = Instant::now() + pause(took);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut resized = signal(SignalKind::window_change())?;
    let mut screen = Screen::open()?;
    let mut trouble: Option<(String, Instant)> = None;
    let mut asking: Option<JoinHandle<Asked>> = None;
    loop {
        let frame = Frame {
            envelope: &envelope,
            before: before.as_ref(),
            trouble: trouble
                .as_ref()
                .map(|(what, since)| (what.as_str(), since.elapsed())),
            size: screen.size(),
            colour: out.colour,
            now: Timestamp::now(),
        };
        screen.show(&frame.lines())?;
        tokio::select! {
            () = sleep_until(next), if asking.is_none() => {
                let client = client.clone();
                asking = Some(tokio::spawn(async move { ask(&client).await }));
            }
            (answer, took) = answered(&mut asking) => {
                asking = None;
                next = Instant::now() + pause(took);
                match answer {
                    Ok(fresh) => {
                        before = Some(Before::of(&envelope));
                        envelope = fresh;
                        trouble = None;
                    }
                    Err(failure) => {
                        let since = trouble.map_or_else(Instant::now, |(_, since)| since);
                        trouble = Some((failure.to_string(), since));
                    }
                }
            }
            key = screen.key() => if key? == Key::End { return Ok(()) },
            _ = resized.recv() => {}
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        }
    }
}

/// How long the agent is left alone that took so long to answer.
fn pause(took: Duration) -> Duration {
    EVERY.saturating_sub(took).max(took * REST)
}

async fn answered(asking: &mut Option<JoinHandle<Asked>>) -> Asked {
    match asking {
        Some(task) => task.await.unwrap_or_else(|error| {
            let failure = Failure::Said(format!("asking the agent: {error}"));
            (Err(failure), Duration::ZERO)
        }),
        None => std::future::pending().await,
    }
}

async fn ask(client: &Client) -> Asked {
    let began = Instant::now();
    let asked = async {
        let body = client.get("/v1/destinations").await?;
        Ok(serde_json::from_slice(&body)?)
    };
    (asked.await, began.elapsed())
}

/// One table, with the rates of a second.
async fn once(client: &Client, out: &mut Output<'_>) -> Result<(), Failure> {
    let before = Before::of(&ask(client).await.0?);
    sleep(EVERY).await;
    let envelope = ask(client).await.0?;
    let frame = Frame {
        envelope: &envelope,
        before: Some(&before),
        trouble: None,
        // Every row, and every column.
        size: (usize::MAX, usize::MAX),
        colour: out.colour,
        now: Timestamp::now(),
    };
    for line in frame.lines() {
        writeln!(out, "{line}")?;
    }
    Ok(())
}
