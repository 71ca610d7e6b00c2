//! Random things that happen, for the property tests.

use proptest::prelude::*;

use super::*;
use crate::core::HungRule;

/// Rows in play.
pub(super) const ROWS: u32 = 3;
/// Policies in play.
pub(super) const POLICIES: usize = 3;

/// Something that happens, in terms that make sense at any time.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Configure {
        row: u32,
        policy: usize,
    },
    NewOwner {
        row: u32,
    },
    /// `None`: its number is taken and its entry is not written.
    Call {
        row: u32,
        window: usize,
        how: Option<How>,
    },
    Look {
        row: u32,
        kind: WindowKind,
    },
    ProbeStarted {
        row: u32,
        late: u32,
    },
    ProbeEnded {
        row: u32,
        late: u32,
        outcome: ProbeOutcome,
    },
    DialEnded {
        target: u32,
        success: bool,
    },
    /// So many more.
    Refused {
        row: u32,
        more: u64,
    },
    Trip {
        row: u32,
        time: Nanos,
    },
    HoldClosed {
        row: u32,
        time: Nanos,
    },
    Reset {
        row: u32,
    },
    Forget {
        row: u32,
    },
    Deadline,
    Wait(Nanos),
    WaitForDeadline,
    ClockGoesBack(Nanos),
}

impl Op {
    pub(super) fn row(&self) -> Option<u32> {
        match *self {
            Self::Configure { row, .. }
            | Self::NewOwner { row }
            | Self::Call { row, .. }
            | Self::Look { row, .. }
            | Self::ProbeStarted { row, .. }
            | Self::ProbeEnded { row, .. }
            | Self::Refused { row, .. }
            | Self::Trip { row, .. }
            | Self::HoldClosed { row, .. }
            | Self::Reset { row }
            | Self::Forget { row } => Some(row),
            Self::DialEnded { .. }
            | Self::Deadline
            | Self::Wait(_)
            | Self::WaitForDeadline
            | Self::ClockGoesBack(_) => None,
        }
    }
}

/// Rows 0 and 1 go to one target, row 2 to another.
pub(super) fn target_of(row: u32) -> DialTarget {
    target(row / 2)
}

/// The event of an operation; `refused`: of its row so far; `None` for what happens outside the engine.
#[expect(
    clippy::too_many_arguments,
    reason = "each is what some event is made of"
)]
pub(super) fn event_of<'a>(
    op: &Op,
    id: impl Fn(u32) -> RowId,
    generation: u32,
    until: Nanos,
    refused: u64,
    last_seqs: [u64; 2],
    windows: [&'a CallWindow; 2],
    policies: &[Arc<BreakerSettings>],
) -> Option<Event<'a>> {
    Some(match *op {
        Op::Configure { row, policy } => Event::Configure {
            row: id(row),
            target: target_of(row),
            settings: policies[policy].clone(),
            generation,
        },
        Op::NewOwner { row } => Event::Configure {
            row: id(row),
            target: target_of(row),
            settings: policies[0].clone(),
            generation,
        },
        Op::Look { row, kind } => Event::Calls {
            row: id(row),
            kind,
            last_seq: last_seqs[usize::from(kind == WindowKind::Exchanges)],
            window: windows[usize::from(kind == WindowKind::Exchanges)],
        },
        Op::ProbeStarted { row, late } => Event::ProbeStarted {
            row: id(row),
            generation: generation.wrapping_sub(late),
        },
        Op::ProbeEnded { row, late, outcome } => Event::ProbeEnded {
            row: id(row),
            generation: generation.wrapping_sub(late),
            outcome,
            last_seqs,
        },
        Op::DialEnded {
            target: number,
            success,
        } => Event::DialEnded {
            target: target(number),
            success,
        },
        Op::Refused { row, .. } => Event::Refused {
            row: id(row),
            refused,
        },
        Op::Trip { row, .. } => Event::Trip {
            row: id(row),
            until,
            last_seqs,
        },
        Op::HoldClosed { row, .. } => Event::HoldClosed {
            row: id(row),
            until,
            last_seqs,
        },
        Op::Reset { row } => Event::Reset {
            row: id(row),
            last_seqs,
        },
        Op::Forget { row } => Event::Forget { row: id(row) },
        Op::Deadline => Event::Deadline,
        Op::Call { .. } | Op::Wait(_) | Op::WaitForDeadline | Op::ClockGoesBack(_) => return None,
    })
}

pub(super) fn any_op() -> impl Strategy<Value = Op> {
    let row = || 0..ROWS;
    let outcome = prop_oneof![
        3 => Just(ProbeOutcome::Success),
        1 => Just(ProbeOutcome::Failure),
        1 => Just(ProbeOutcome::Returned),
        1 => Just(ProbeOutcome::Unanswered),
    ];
    let late = || prop_oneof![5 => Just(0u32), 1 => Just(1u32)];
    let how = prop_oneof![
        6 => Just(Some(How::Badly)),
        1 => Just(Some(How::Well)),
        1 => Just(Some(How::Slowly)),
        1 => Just(None),
    ];
    let kind = prop_oneof![
        8 => Just(WindowKind::Connects),
        8 => Just(WindowKind::Exchanges),
        1 => Just(WindowKind::None),
    ];
    prop_oneof![
        3 => (row(), 0..POLICIES).prop_map(|(row, policy)| Op::Configure { row, policy }),
        1 => row().prop_map(|row| Op::NewOwner { row }),
        24 => (row(), 0..2usize, how)
            .prop_map(|(row, window, how)| Op::Call { row, window, how }),
        18 => (row(), kind).prop_map(|(row, kind)| Op::Look { row, kind }),
        5 => (row(), late()).prop_map(|(row, late)| Op::ProbeStarted { row, late }),
        14 => (row(), late(), outcome)
            .prop_map(|(row, late, outcome)| Op::ProbeEnded { row, late, outcome }),
        4 => (0..2u32, any::<bool>())
            .prop_map(|(target, success)| Op::DialEnded { target, success }),
        6 => (row(), prop_oneof![1u64..5, 40u64..60])
            .prop_map(|(row, more)| Op::Refused { row, more }),
        1 => (row(), time()).prop_map(|(row, time)| Op::Trip { row, time }),
        1 => (row(), time()).prop_map(|(row, time)| Op::HoldClosed { row, time }),
        1 => row().prop_map(|row| Op::Reset { row }),
        1 => row().prop_map(|row| Op::Forget { row }),
        6 => Just(Op::Deadline),
        6 => time().prop_map(Op::Wait),
        8 => Just(Op::WaitForDeadline),
        1 => time().prop_map(Op::ClockGoesBack),
    ]
}

fn time() -> impl Strategy<Value = Nanos> {
    prop_oneof![
        3 => (0u64..2_000_000_000).prop_map(Nanos),
        1 => (0u64..100_000_000_000).prop_map(Nanos),
    ]
}

pub(super) fn settings() -> impl Strategy<Value = BreakerSettings> {
    (
        prop::bool::weighted(0.9),
        prop::array::uniform2(prop::option::weighted(0.7, 0.0f64..=1.0)),
        (1u32..=30, 0u32..8, 0u32..5),
        (1u64..40, 1u64..40, 1u64..200),
        prop::bool::weighted(0.8),
        (1u32..4, 1u32..5, 1u64..5, 1u64..100),
        prop_oneof![Just(111u16), Just(113u16)],
    )
        .prop_map(
            |(enabled, rates, counts, times, redial, probes, errno)| BreakerSettings {
                enabled,
                failure_rate: rates[0],
                slow_call_rate: rates[1],
                window: counts.0,
                min_calls: counts.1,
                consecutive_failures: counts.2,
                window_age: secs(times.0),
                cooldown: secs(times.1),
                cooldown_max: secs(times.2),
                redial,
                probes: probes.0,
                successes_to_close: probes.1,
                max_open_share: None,
                node_scope: false,
                probe_lease: secs(probes.2),
                exchange_lease: secs(probes.3),
                hung: HungRule::Auto,
                errno,
            },
        )
}
