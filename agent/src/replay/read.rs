//! From lines to calls.

use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;

use serde::Deserialize;

use crate::control::api::{Event, EventRecord, Timestamp, Window};
use crate::core::{Nanos, WindowKind};

/// Longest line, bytes.
const LONGEST_LINE: u64 = 1 << 20;
/// Most calls in one line: a second of the busiest destination has far fewer.
const MOST_CALLS: u64 = 10_000_000;
/// Kinds of events that are named when they are skipped; the others are counted together.
const NAMED_KINDS: usize = 50;
/// Lines of one window are out of order by no more than this.
const DISORDER: Nanos = Nanos::from_secs(10);

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct ReadError {
    /// From 1.
    pub line: u64,
    /// What is wrong.
    pub what: String,
}

/// Whose calls they are.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowKey {
    /// Address and port.
    pub destination: String,
    /// The callers' control group.
    pub workload: String,
    /// Inode of the network namespace, where it is known.
    pub netns: Option<u64>,
}

/// Calls with one outcome that follow one another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    /// Number of the first.
    pub from_seq: u64,
    /// Number of the last.
    pub to_seq: u64,
    /// When the first ended.
    pub first: Nanos,
    /// When the last ended; those between them are spread evenly.
    pub last: Nanos,
    /// How long each took: of a run of good calls, their median.
    pub latency: Nanos,
    /// Whether they failed.
    pub failed: bool,
    /// Whether they were slow.
    pub slow: bool,
    /// The longest of them took this long.
    pub longest: Nanos,
    /// Calls between the segment before and this one, of which nothing was recorded.
    pub missing_before: u64,
}

impl Segment {
    /// How many calls.
    pub fn len(&self) -> u64 {
        self.to_seq - self.from_seq + 1
    }

    /// When one of them ended, counted from 0.
    pub fn end(&self, n: u64) -> Nanos {
        let span = u128::from((self.last - self.first).0);
        let steps = u128::from((self.len() - 1).max(1));
        // Less than the span, which fits.
        self.first + Nanos((span * u128::from(n) / steps) as u64)
    }
}

/// What was recorded of a row.
#[derive(Debug, Default)]
pub struct RecordedRow {
    /// Connects and exchanges, each in the order of their numbers; ends never go back in time.
    pub windows: [Vec<Segment>; 2],
    /// When so many calls had been refused since the last such line.
    pub refused: Vec<(Nanos, u64)>,
}

/// Calls that were recorded.
#[derive(Debug, Default)]
pub struct Recording {
    /// By whose they are.
    pub rows: BTreeMap<RowKey, RecordedRow>,
    /// Dials of the agent: when, destination, namespace, and whether it was answered.
    pub redials: Vec<(Nanos, String, Option<u64>, bool)>,
    /// Lines that were read, blank ones apart.
    pub lines: u64,
    /// Lines that say nothing of calls, by kind.
    pub skipped: BTreeMap<String, u64>,
    /// Lines about calls that an earlier line was about.
    pub duplicates: u64,
    /// Calls of which nothing was recorded, though calls before and after them were.
    pub missing: u64,
}

#[derive(Deserialize)]
struct Kind {
    kind: String,
}

/// Reads lines of `backstop events --all --json`, in any order that is right to within seconds. Kinds
/// that say nothing of calls are skipped and counted.
///
/// # Errors
/// A line that is no event, or says something impossible.
pub fn read(lines: impl BufRead) -> Result<Recording, ReadError> {
    let mut reader = Reader::default();
    let mut lines = lines;
    let mut bytes = Vec::new();
    for number in 1.. {
        let at = |what: String| ReadError { line: number, what };
        bytes.clear();
        let length = std::io::Read::take(&mut lines, LONGEST_LINE)
            .read_until(b'\n', &mut bytes)
            .map_err(|error| at(format!("it cannot be read: {error}")))?;
        if length == 0 {
            break;
        }
        if length as u64 == LONGEST_LINE && bytes.last() != Some(&b'\n') {
            return Err(at(format!(
                "longer than {LONGEST_LINE} bytes, as no event is"
            )));
        }
        let text = std::str::from_utf8(&bytes)
            .map_err(|_| at("not UTF-8, as events are".to_owned()))?
            .trim();
        if !text.is_empty() {
            reader.line(text).map_err(at)?;
        }
    }
    Ok(reader.finish())
}

#[derive(Default)]
struct Reader {
    recording: Recording,
    windows: HashMap<RowKey, [Vec<Epoch>; 2]>,
}

/// Numbers of calls from 1 on: an agent that is started anew, or a row that is made anew, begins
/// another one.
#[derive(Default)]
struct Epoch {
    /// By their first number.
    segments: BTreeMap<u64, Segment>,
    newest: Nanos,
}

impl Reader {
    fn line(&mut self, text: &str) -> Result<(), String> {
        let no_event = |error| {
            match text.starts_with('{') {
            true => format!("not an event as `backstop events --json` prints it: {error}"),
            false => "not an event: no JSON object; record them with `backstop events --follow --all --json`"
                .to_owned(),
        }
        };
        let Kind { kind } = serde_json::from_str(text).map_err(no_event)?;
        self.recording.lines += 1;
        if !["failure", "calls", "rejected", "redial"].contains(&kind.as_str()) {
            let skipped = &mut self.recording.skipped;
            let named = skipped.len() < NAMED_KINDS || skipped.contains_key(&kind);
            let name = if named { kind } else { "(others)".to_owned() };
            *skipped.entry(name).or_default() += 1;
            return Ok(());
        }
        let EventRecord { time, event } = serde_json::from_str(text).map_err(no_event)?;
        match event {
            Event::Failure {
                destination,
                workload,
                netns,
                window,
                outcome,
                seq,
                latency_us,
                ..
            } => {
                let row = key(destination, workload, netns);
                let at = nanos(time);
                let latency = Nanos(latency_us.saturating_mul(1000));
                let slow = outcome == "slow";
                let segment = Segment {
                    from_seq: seq,
                    to_seq: seq,
                    first: at,
                    last: at,
                    latency,
                    failed: !slow,
                    slow,
                    longest: latency,
                    missing_before: 0,
                };
                self.segment(row, window, segment)
            }
            Event::Calls {
                destination,
                workload,
                netns,
                window,
                from_seq,
                to_seq,
                first_time,
                last_time,
                latency_us,
                ..
            } => {
                let row = key(destination, workload, netns);
                let us = |us: Option<u64>| Nanos(us.unwrap_or(0).saturating_mul(1000));
                let segment = Segment {
                    from_seq,
                    to_seq,
                    first: nanos(first_time).min(nanos(last_time)),
                    last: nanos(last_time),
                    latency: us(latency_us.p50),
                    failed: false,
                    slow: false,
                    longest: us(latency_us.max),
                    missing_before: 0,
                };
                self.segment(row, window, segment)
            }
            Event::Rejected {
                destination,
                workload,
                netns,
                count,
                ..
            } => {
                let row = key(destination, workload, netns);
                let row = self.recording.rows.entry(row).or_default();
                row.refused.push((nanos(time), count));
                Ok(())
            }
            Event::Redial {
                destination,
                netns,
                answered,
            } => {
                let redial = (nanos(time), destination, netns, answered);
                self.recording.redials.push(redial);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn segment(&mut self, row: RowKey, window: Window, segment: Segment) -> Result<(), String> {
        let index = match window {
            Window::Connects => WindowKind::Connects,
            Window::Exchanges => WindowKind::Exchanges,
            Window::None => WindowKind::None,
        };
        let index = index
            .index()
            .ok_or("a call of no window; want connects or exchanges")?;
        if segment.from_seq == 0 || segment.to_seq < segment.from_seq {
            return Err(format!(
                "calls {} to {}: numbers of calls begin with 1 and go up",
                segment.from_seq, segment.to_seq
            ));
        }
        if segment.len() > MOST_CALLS {
            let calls = segment.len();
            return Err(format!(
                "a run of {calls} calls; at most {MOST_CALLS} are read"
            ));
        }
        let epochs = &mut self.windows.entry(row).or_default()[index];
        if epochs.is_empty() {
            epochs.push(Epoch::default());
        }
        let Some(epoch) = epochs.last_mut() else {
            return Ok(());
        };
        if epoch.overlaps(&segment) {
            // The same calls again, or other ones with the same numbers, later.
            if segment.last <= epoch.newest {
                self.recording.duplicates += 1;
                return Ok(());
            }
            epochs.push(Epoch::default());
        } else if epoch.is_before(&segment) {
            epochs.push(Epoch::default());
        }
        if let Some(epoch) = epochs.last_mut() {
            epoch.newest = epoch.newest.max(segment.last);
            epoch.segments.insert(segment.from_seq, segment);
        }
        Ok(())
    }

    fn finish(mut self) -> Recording {
        for (row, windows) in self.windows {
            let row = self.recording.rows.entry(row).or_default();
            for (index, epochs) in windows.into_iter().enumerate() {
                let mut time = Nanos::ZERO;
                for epoch in epochs {
                    let mut last_seq = None;
                    for mut segment in epoch.segments.into_values() {
                        // Times in a ring are to within milliseconds; the order is exact.
                        segment.first = segment.first.max(time);
                        segment.last = segment.last.max(segment.first);
                        time = segment.last;
                        let next =
                            last_seq.map_or(segment.from_seq, |last: u64| last.saturating_add(1));
                        segment.missing_before = segment.from_seq.saturating_sub(next);
                        let missing = &mut self.recording.missing;
                        *missing = missing.saturating_add(segment.missing_before);
                        last_seq = Some(segment.to_seq);
                        row.windows[index].push(segment);
                    }
                }
            }
        }
        for row in self.recording.rows.values_mut() {
            row.refused.sort_unstable();
        }
        self.recording.redials.sort();
        self.recording
    }
}

impl Epoch {
    fn overlaps(&self, segment: &Segment) -> bool {
        let before = self.segments.range(..=segment.to_seq).next_back();
        before.is_some_and(|(_, known)| known.to_seq >= segment.from_seq)
    }

    /// Whether the segment has lower numbers than all here and came clearly later.
    fn is_before(&self, segment: &Segment) -> bool {
        let lowest = self.segments.first_key_value().map(|(first, _)| *first);
        lowest.is_some_and(|lowest| segment.to_seq < lowest)
            && segment.first > self.newest + DISORDER
    }
}

fn key(destination: String, workload: String, netns: Option<u64>) -> RowKey {
    RowKey {
        destination,
        workload,
        netns,
    }
}

/// The virtual clock begins in 1970.
pub(super) fn nanos(time: Timestamp) -> Nanos {
    Nanos::from_millis(time.unix_ms())
}

/// And back.
pub(super) fn timestamp(at: Nanos) -> Timestamp {
    Timestamp::from_unix_ms(at.as_millis())
}
