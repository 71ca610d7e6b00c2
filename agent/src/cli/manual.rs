//! What changes something: trip, hold-closed, reset, pause, resume.

use std::{io::Write, time::Duration};

use super::{
    Failure, ForcedArgs, Target,
    output::Output,
    table::order,
    units::{clean, exact, number},
};
use crate::control::{
    api::{ManualResult, PauseResult, check_order_workload, parse_destination},
    client::{Client, encode},
};

pub async fn trip(client: &Client, args: &ForcedArgs, out: &mut Output<'_>) -> Result<(), Failure> {
    forced(client, args, "trip", "is refused", out).await
}

pub async fn hold_closed(
    client: &Client,
    args: &ForcedArgs,
    out: &mut Output<'_>,
) -> Result<(), Failure> {
    forced(client, args, "hold-closed", "is held closed", out).await
}

async fn forced(
    client: &Client,
    args: &ForcedArgs,
    action: &str,
    state: &str,
    out: &mut Output<'_>,
) -> Result<(), Failure> {
    let duration = written(args.duration);
    let query = [("for", Some(duration.as_str()))];
    let done = post(client, &args.target, action, &query).await?;
    writeln!(
        out,
        "{} {state} for {duration}, {}: {} now, and those still to come",
        clean(&args.target.destination),
        whom(&args.target),
        number(done.rows, "row")
    )?;
    Ok(())
}

pub async fn reset(client: &Client, target: &Target, out: &mut Output<'_>) -> Result<(), Failure> {
    let done = post(client, target, "reset", &[]).await?;
    let taken = match done.taken_back {
        0 => "no order was in force".to_owned(),
        orders => format!("{} taken back", number(orders, "order")),
    };
    let already = done.closed_already.min(done.rows);
    let closed = match (done.rows - already, already) {
        (closed, 0) => format!("{} closed", number(closed, "row")),
        (0, 1) => "1 row was closed already".to_owned(),
        (0, already) => format!("{} were closed already", number(already, "row")),
        (closed, already) => format!(
            "{} closed, {already} {} closed already",
            number(closed, "row"),
            if already == 1 { "was" } else { "were" }
        ),
    };
    writeln!(
        out,
        "{} is reset, {}: {taken}, {closed}",
        clean(&target.destination),
        whom(target),
    )?;
    if !done.left.is_empty() {
        writeln!(out, "Not everything passes: in force still, by hand")?;
    }
    for left in &done.left {
        let (what, who) = order(left);
        writeln!(out, "  {what}\n    {who}")?;
        let workload = left.workload.as_deref();
        let flag = workload.map_or_else(String::new, |w| format!(" --workload {}", clean(w)));
        writeln!(
            out,
            "    `backstop reset {}{flag}` takes that back",
            clean(&left.destination)
        )?;
    }
    Ok(())
}

async fn post(
    client: &Client,
    target: &Target,
    action: &str,
    more: &[(&str, Option<&str>)],
) -> Result<ManualResult, Failure> {
    // What cannot be meant is said without an agent, too.
    parse_destination(&target.destination).map_err(Failure::Usage)?;
    if let Some(workload) = &target.workload {
        check_order_workload(workload).map_err(|e| Failure::Usage(format!("--workload: {e}")))?;
    }
    let mut query = more.to_vec();
    query.push(("workload", target.workload.as_deref()));
    let path = format!("/v1/destinations/{}/{action}", encode(&target.destination));
    let body = client.post(&with_query(path, &query)).await?;
    Ok(serde_json::from_slice(&body)?)
}

fn whom(target: &Target) -> String {
    match &target.workload {
        Some(workload) => format!("for workload {}", clean(workload)),
        None => "for all workloads".to_owned(),
    }
}

pub async fn pause(
    client: &Client,
    duration: Option<Duration>,
    out: &mut Output<'_>,
) -> Result<(), Failure> {
    let duration = duration.map(written);
    let target = with_query("/v1/pause".to_owned(), &[("for", duration.as_deref())]);
    let body = client.post(&target).await?;
    let _: PauseResult = serde_json::from_slice(&body)?;
    match duration {
        Some(duration) => writeln!(
            out,
            "paused for {duration}; `backstop resume` ends it sooner"
        )?,
        None => writeln!(out, "paused until `backstop resume`")?,
    }
    Ok(())
}

pub async fn resume(client: &Client, out: &mut Output<'_>) -> Result<(), Failure> {
    let body = client.post("/v1/resume").await?;
    let done: PauseResult = serde_json::from_slice(&body)?;
    match done.ended {
        Some(ended) => writeln!(
            out,
            "resumed: verdicts and timeouts are in force again, paused since {} UTC by {}",
            ended.since.short(),
            clean(&ended.by)
        )?,
        None => writeln!(
            out,
            "nothing was paused: verdicts and timeouts are in force"
        )?,
    }
    Ok(())
}

/// To the millisecond; never less than was asked for.
fn written(duration: Duration) -> String {
    exact(u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX))
}

pub(super) fn with_query(mut target: String, query: &[(&str, Option<&str>)]) -> String {
    let mut mark = '?';
    for (name, value) in query {
        if let Some(value) = value {
            target.push(mark);
            target.push_str(&format!("{name}={}", encode(value)));
            mark = '&';
        }
    }
    target
}
