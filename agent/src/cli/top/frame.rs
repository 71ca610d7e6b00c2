//! What `top` shows: from two answers of the agent to the lines of a screen.
//!
//! Pure. No line is longer than the screen is wide, and there are no more of them than it is high; whatever
//! programs and administrators have named is made harmless on its way.

use std::{collections::HashMap, time::Duration};

use super::super::{
    table::{Cell, GAP, LOUD, Style, WORKLOAD_MIN, heading, left, p99, right, state, window},
    units::{age, clean, running, short_count, shorten_left},
};
use crate::control::api::{Mode, Row, StatusEnvelope, Timestamp};

/// Fewest columns for a destination: an IPv4 address with its port.
const DESTINATION_MIN: usize = 21;
/// A screen of fewer columns rather shows numbers than workloads.
const NARROW: usize = 80;
/// Of the lines of a screen, so many may go to what stands above the table: a third.
const HEADING_SHARE: usize = 3;

/// Counters of an earlier answer.
pub struct Before {
    uptime_ms: u64,
    rows: HashMap<Key, Counts>,
}

type Key = (String, String, Option<u64>);

#[derive(Clone, Copy, Default)]
struct Counts {
    attempts: u64,
    failed: u64,
    rejected: u64,
}

impl Counts {
    fn of(row: &Row, mode: Mode) -> Self {
        Self {
            attempts: row.attempts,
            failed: row.failures.total(),
            rejected: match mode {
                Mode::Enforce => row.rejected.total(),
                Mode::Observe => row.would_reject.total(),
            },
        }
    }
}

fn key(row: &Row) -> Key {
    (row.destination.clone(), row.workload.clone(), row.netns)
}

impl Before {
    /// Those of this one.
    pub fn of(envelope: &StatusEnvelope) -> Self {
        let rows = envelope.destinations.iter();
        Self {
            uptime_ms: envelope.uptime_ms,
            rows: rows
                .map(|row| (key(row), Counts::of(row, envelope.mode)))
                .collect(),
        }
    }

    /// What has happened a second since; `None` where that cannot be told: the agent was restarted.
    fn rates(&self, envelope: &StatusEnvelope, row: &Row) -> Option<Counts> {
        let ms = envelope
            .uptime_ms
            .checked_sub(self.uptime_ms)
            .filter(|ms| *ms > 0)?;
        let now = Counts::of(row, envelope.mode);
        // New since: all of it has happened since.
        let before = self.rows.get(&key(row)).copied().unwrap_or_default();
        // A row that was given up and made anew counts from 0.
        let rate = |now: u64, before: u64| match now.checked_sub(before) {
            Some(more) => (more.saturating_mul(1000) + ms / 2) / ms,
            None => now.saturating_mul(1000) / ms,
        };
        Some(Counts {
            attempts: rate(now.attempts, before.attempts),
            failed: rate(now.failed, before.failed),
            rejected: rate(now.rejected, before.rejected),
        })
    }
}

/// Everything that a screen is made of.
pub struct Frame<'a> {
    /// The last answer.
    pub envelope: &'a StatusEnvelope,
    /// The one before.
    pub before: Option<&'a Before>,
    /// Why there is none now, and since when.
    pub trouble: Option<(&'a str, Duration)>,
    /// Columns and lines.
    pub size: (usize, usize),
    /// ANSI colours.
    pub colour: bool,
    /// For how long a pause still lasts.
    pub now: Timestamp,
}

impl Frame<'_> {
    /// The lines, at most as many as the screen has, and none longer than it is wide.
    pub fn lines(&self) -> Vec<String> {
        let (width, height) = self.size;
        let plain = Style {
            colour: false,
            width,
            now: self.now,
        };
        let style = Style {
            colour: self.colour,
            ..plain
        };
        let mut lines = Vec::new();
        if let Some((what, since)) = self.trouble {
            let ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
            let text = format!("For {}: {}", running(ms), clean(what));
            lines.push(style.paint(LOUD, &cut(&text, width)));
            lines.push(cut(
                "Asked again each second; below is what it said last.",
                width,
            ));
        }
        let envelope = self.envelope;
        // Painted only here: a line that is cut must not lose the end of its colour.
        let above = heading(envelope, plain);
        let most = (height / HEADING_SHARE).max(1);
        let above: Vec<&str> = above.lines().collect();
        for (at, line) in above.iter().take(most).enumerate() {
            let is_last = at + 1 == most && above.len() > most;
            let text = match is_last {
                true => format!("{line}  (and more: backstop status)"),
                false => (*line).to_owned(),
            };
            let colour = if line.starts_with("PAUSED ") {
                LOUD
            } else {
                ""
            };
            lines.push(style.paint(colour, &cut(&text, width)));
        }
        lines.push(String::new());
        if envelope.destinations.is_empty() {
            lines.push(cut("No destination seen yet.", width));
            lines.truncate(height);
            return lines;
        }
        let room = height.saturating_sub(lines.len() + 1);
        let total = envelope.destinations.len();
        // One line less where the last one says how many there are more.
        let shown = if total <= room {
            total
        } else {
            room.saturating_sub(1)
        };
        lines.extend(self.table(envelope, shown, style));
        if shown < total {
            lines.push(cut(&format!("and {} more", total - shown), width));
        }
        lines.truncate(height);
        lines
    }

    /// The titles and the first rows.
    fn table(&self, envelope: &StatusEnvelope, shown: usize, style: Style) -> Vec<String> {
        let (width, _) = self.size;
        let rows = &envelope.destinations[..shown];
        let mut table: Vec<Vec<Cell>> = vec![titles(envelope.mode)];
        table.extend(rows.iter().map(|row| self.cells(envelope, row)));
        let mut widths = widths(&table);
        let total = |widths: &[usize]| {
            let gaps = GAP * widths.len().saturating_sub(1);
            widths.iter().sum::<usize>().saturating_add(gaps)
        };
        // What there is too much of is taken from paths first, then from names of destinations.
        let workload_min = if width < NARROW { 0 } else { WORKLOAD_MIN };
        for (column, least) in [(1, workload_min), (0, DESTINATION_MIN)] {
            let over = total(&widths).saturating_sub(width);
            let most = widths[column].saturating_sub(over).max(least);
            widths[column] = widths[column].min(most);
        }
        table
            .iter()
            .map(|line| joined(line, &widths, width, style))
            .collect()
    }

    fn cells(&self, envelope: &StatusEnvelope, row: &Row) -> Vec<Cell> {
        let counts = Counts::of(row, envelope.mode);
        let rates = self.before.filter(|_| self.trouble.is_none());
        let rates = rates.and_then(|before| before.rates(envelope, row));
        let rate = |of: fn(&Counts) -> u64| {
            right(
                rates
                    .as_ref()
                    .map_or("-".to_owned(), |rates| short_count(of(rates))),
            )
        };
        let (word, colour) = state(row);
        vec![
            left(clean(&row.destination)),
            left(clean(&row.workload)),
            Cell {
                colour,
                ..left(format!("{word} {}", age(row.state_age_ms)))
            },
            rate(|of| of.attempts),
            rate(|of| of.failed),
            rate(|of| of.rejected),
            right(window(row)),
            right(p99(row)),
            right(short_count(counts.attempts)),
            right(short_count(counts.failed)),
            right(short_count(counts.rejected)),
        ]
    }
}

/// What matters most stands left: a narrow screen shows the begin.
fn titles(mode: Mode) -> Vec<Cell> {
    let (rate, sum) = match mode {
        Mode::Enforce => ("REJ/s", "REJECTED"),
        Mode::Observe => ("WOULD/s", "WOULD-REJ"),
    };
    let mut titles = vec![left("DESTINATION"), left("WORKLOAD"), left("STATE")];
    let numbers = [
        "ATT/s", "FAIL/s", rate, "WINDOW", "P99", "ATTEMPTS", "FAILED", sum,
    ];
    titles.extend(numbers.map(right));
    titles
}

fn widths(table: &[Vec<Cell>]) -> Vec<usize> {
    let mut widths = Vec::new();
    for line in table {
        widths.resize(line.len().max(widths.len()), 0);
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.text.chars().count());
        }
    }
    widths
}

/// A line of the table, cut where the screen ends.
fn joined(line: &[Cell], widths: &[usize], screen: usize, style: Style) -> String {
    let mut text = String::new();
    let mut room = screen;
    for (at, (cell, &width)) in line.iter().zip(widths).enumerate() {
        let width = if at == 0 { width.min(screen) } else { width };
        if width == 0 {
            continue;
        }
        let gap = if at > 0 { GAP } else { 0 };
        // A number that is cut is another number.
        if room < gap + width {
            break;
        }
        let short = shorten_left(&cell.text, width);
        let padded = match cell.right {
            true => format!("{short:>width$}"),
            false => format!("{short:<width$}"),
        };
        text.push_str(&" ".repeat(gap));
        text.push_str(&style.paint(cell.colour, &padded));
        room -= gap + width;
    }
    text.truncate(text.trim_end_matches(' ').len());
    text
}

/// At most so many characters.
fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}
