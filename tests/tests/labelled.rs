//! What Backstop takes for a retry, attempt by attempt, of a few programs and for a few seconds: the short form of
//! `cargo xtask retries`.

#![expect(
    clippy::print_stdout,
    reason = "figures for docs/RETRIES.md, shown by --nocapture"
)]

use tests::truth::{Cell, Figures, measure, programs::CALLERS};

/// Slow enough that a busy machine does not make a retry look like a fresh call.
const RATE: u32 = 10;
const SECONDS: u64 = 4;
const PERCENT: u64 = 40;

fn look(name: &str) -> Option<Figures> {
    let caller = CALLERS.iter().find(|caller| caller.name == name);
    let caller = caller.expect("a program of that name");
    if !caller.needs.is_met() {
        tests::say_skipped(format_args!("{} is not there", caller.needs));
        return None;
    }
    let figures = measure(Cell {
        caller,
        percent: PERCENT,
        rate: RATE,
        seconds: SECONDS,
    });
    println!(
        "{name}: {} calls, {} retries by its own log, {:?}",
        figures.own.calls, figures.own.retries, figures.seen
    );
    Some(figures)
}

/// Its own log says the same as the server, and most retries are seen, and hardly any fresh call is taken for one.
///
/// The targets are those of `cargo xtask retries`. Here is room for a busy machine, on which a client may give up,
/// or pause where it would not.
#[track_caller]
fn is_seen_to_retry(name: &str) {
    let Some(figures) = look(name) else { return };
    let (own, seen) = (figures.own, figures.seen);
    assert!(own.retries >= 10, "{own:?}");
    assert!(seen.retries.abs_diff(own.retries) <= 2, "{own:?}, {seen:?}");
    assert!(seen.unknown <= 2, "{seen:?}");
    assert!(
        seen.retries_taken * 10 >= seen.retries * 6,
        "{own:?}, {seen:?}"
    );
    assert!(seen.fresh_taken * 20 <= own.calls, "{own:?}, {seen:?}");
}

#[test]
fn urllib3_retries() {
    is_seen_to_retry("urllib3 Retry(3)");
}

/// Each of its connections begins with a login, whose commands follow one another at once.
#[test]
fn redis_py_retries() {
    is_seen_to_retry("redis-py Retry(NoBackoff(), 3)");
}

#[test]
fn threads_that_retry() {
    is_seen_to_retry("Python, a thread for each call, a loop");
}

#[test]
fn proxies_retry() {
    is_seen_to_retry("nginx proxy_next_upstream");
}

#[test]
fn who_fails_over_to_another_host_does_not_retry() {
    let name = "libpq, three hosts";
    let Some(figures) = look(name) else { return };
    // Every call has its first host, and every other failure another one.
    assert!(figures.seen.fresh > figures.own.calls, "{figures:?}");
    assert_eq!(
        (figures.taken, figures.by_limit + figures.by_budget),
        (0, 0),
        "{figures:?}"
    );
}
