//! Every state meets every kind of event.
//!
//! A new state changes the length of the rows of the table, a new event the match in
//! [`kinds_of`]: neither compiles without an entry here.

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    ConfiguredAgain,
    ConfiguredOff,
    CallsHealthy,
    CallsFailing,
    ExchangesHealthy,
    ExchangesFailing,
    CallsOfNoWindow,
    ProbeStarted,
    ProbeStartedLate,
    FirstSuccess,
    LastSuccess,
    SuccessLate,
    ProbeFailed,
    ProbeFailedLate,
    ProbeReturned,
    ProbeUnanswered,
    ExchangeBroken,
    ProbeWaits,
    LastProbeWaits,
    DialAnswered,
    DialAnsweredAfterMisleading,
    DialAnsweredMuchLater,
    DialFailed,
    Refused,
    RefusedOften,
    Trip,
    HoldClosed,
    Reset,
    Lift,
    Named,
    Forget,
    DeadlineEarly,
    DeadlineDue,
}

use Kind::*;

/// The kinds that an event is tested in.
fn kinds_of(event: &Event<'_>) -> &'static [Kind] {
    match event {
        Event::Configure { .. } => &[ConfiguredAgain, ConfiguredOff],
        Event::Calls { .. } => &[
            CallsHealthy,
            CallsFailing,
            ExchangesHealthy,
            ExchangesFailing,
            CallsOfNoWindow,
        ],
        Event::ProbeStarted { .. } => &[ProbeStarted, ProbeStartedLate],
        Event::ProbeEnded { .. } => &[
            FirstSuccess,
            LastSuccess,
            SuccessLate,
            ProbeFailed,
            ProbeFailedLate,
            ProbeReturned,
            ProbeUnanswered,
        ],
        Event::ExchangeFailed { .. } => &[ExchangeBroken],
        Event::ProbeWaits { .. } => &[ProbeWaits, LastProbeWaits],
        Event::DialEnded { .. } => &[
            DialAnswered,
            DialAnsweredAfterMisleading,
            DialAnsweredMuchLater,
            DialFailed,
        ],
        Event::Refused { .. } => &[Refused, RefusedOften],
        Event::Trip { .. } => &[Trip],
        Event::HoldClosed { .. } => &[HoldClosed],
        Event::Reset { .. } => &[Reset],
        Event::Lift { .. } => &[Lift],
        Event::Groups { .. } => &[Named],
        Event::Forget { .. } => &[Forget],
        Event::Deadline => &[DeadlineEarly, DeadlineDue],
    }
}

const KINDS: [Kind; 33] = [
    ConfiguredAgain,
    ConfiguredOff,
    CallsHealthy,
    CallsFailing,
    ExchangesHealthy,
    ExchangesFailing,
    CallsOfNoWindow,
    ProbeStarted,
    ProbeStartedLate,
    FirstSuccess,
    LastSuccess,
    SuccessLate,
    ProbeFailed,
    ProbeFailedLate,
    ProbeReturned,
    ProbeUnanswered,
    ExchangeBroken,
    ProbeWaits,
    LastProbeWaits,
    DialAnswered,
    DialAnsweredAfterMisleading,
    DialAnsweredMuchLater,
    DialFailed,
    Refused,
    RefusedOften,
    Trip,
    HoldClosed,
    Reset,
    Lift,
    Named,
    Forget,
    DeadlineEarly,
    DeadlineDue,
];

const C: Option<State> = Some(State::Closed);
const O: Option<State> = Some(State::Open);
const H: Option<State> = Some(State::HalfOpen);
const FO: Option<State> = Some(State::ForcedOpen);
const FC: Option<State> = Some(State::ForcedClosed);
const GONE: Option<State> = None;

/// The same where the breaker opened on exchanges: the first dial admits nothing.
#[rustfmt::skip]
fn next_opened_on_exchanges(kind: Kind) -> [Option<State>; State::ALL.len()] {
    match kind {
        //                   Closed Open  Half  FOpen FClosed
        DialAnswered     => [C,     O,    H,    FO,   FC],
        // A probe fails first.
        DialAnsweredAfterMisleading | DialAnsweredMuchLater => [C, O, O, FO, FC],
        ProbeUnanswered  => [C,     O,    H,    FO,   FC],
        LastProbeWaits   => [C,     O,    C,    FO,   FC],
        other            => next(other),
    }
}

/// State after the event, for each state before in the order of [`State::ALL`].
#[rustfmt::skip]
fn next(kind: Kind) -> [Option<State>; State::ALL.len()] {
    match kind {
        //                   Closed Open  Half  FOpen FClosed
        ConfiguredAgain  => [C,     O,    H,    FO,   FC],
        ConfiguredOff    => [C,     C,    C,    FO,   FC],
        CallsHealthy     => [C,     O,    H,    FO,   FC],
        CallsFailing     => [O,     O,    H,    FO,   FC],
        ExchangesHealthy => [C,     O,    H,    FO,   FC],
        ExchangesFailing => [O,     O,    H,    FO,   FC],
        CallsOfNoWindow  => [C,     O,    H,    FO,   FC],
        ProbeStarted     => [C,     O,    H,    FO,   FC],
        ProbeStartedLate => [C,     O,    H,    FO,   FC],
        FirstSuccess     => [C,     O,    H,    FO,   FC],
        LastSuccess      => [C,     O,    C,    FO,   FC],
        SuccessLate      => [C,     O,    H,    FO,   FC],
        ProbeFailed      => [C,     O,    O,    FO,   FC],
        ProbeFailedLate  => [C,     O,    H,    FO,   FC],
        ProbeReturned    => [C,     O,    H,    FO,   FC],
        // Nothing was broken off.
        ProbeUnanswered  => [C,     O,    O,    FO,   FC],
        ExchangeBroken   => [C,     O,    H,    FO,   FC],
        ProbeWaits       => [C,     O,    H,    FO,   FC],
        LastProbeWaits   => [C,     O,    H,    FO,   FC],
        DialAnswered     => [C,     H,    H,    FO,   FC],
        // A probe fails first, so that from HalfOpen the dial before it was misleading.
        DialAnsweredAfterMisleading => [C, H, O, FO, FC],
        DialAnsweredMuchLater       => [C, H, H, FO, FC],
        DialFailed       => [C,     O,    H,    FO,   FC],
        Refused          => [C,     O,    H,    FO,   FC],
        // A trial at most: the state stays.
        RefusedOften     => [C,     O,    H,    FO,   FC],
        Trip             => [FO,    FO,   FO,   FO,   FO],
        HoldClosed       => [FC,    FC,   FC,   FC,   FC],
        Reset            => [C,     C,    C,    C,    C],
        Lift             => [C,     O,    H,    C,    C],
        Named            => [C,     O,    H,    FO,   FC],
        Forget           => [GONE,  GONE, GONE, GONE, GONE],
        DeadlineEarly    => [C,     O,    H,    FO,   FC],
        DeadlineDue      => [GONE,  H,    H,    C,    C],
    }
}

fn send(one: &mut One, kind: Kind) {
    let generation = one.view().generation;
    let last_seqs = one.last_seqs();
    let ended = |generation: u32, outcome| Event::ProbeEnded {
        row: ROW,
        generation,
        outcome,
        last_seqs,
    };
    let until = one.now + secs(60);
    let broken = |at| Event::ExchangeFailed {
        row: ROW,
        at,
        broken_after: Some(secs(9)),
    };
    let waits = |generation: u32| Event::ProbeWaits {
        row: ROW,
        generation,
        waited: secs(20),
        answers_nobody: false,
        last_seqs,
    };
    let event = match kind {
        ConfiguredAgain | ConfiguredOff => Event::Configure {
            row: ROW,
            target: target(1),
            settings: Arc::new(BreakerSettings {
                enabled: kind == ConfiguredAgain,
                ..BreakerSettings::default()
            }),
            generation,
        },
        CallsHealthy | CallsFailing => {
            for _ in 0..20 {
                one.ring.push(one.now, kind == CallsFailing);
            }
            return one.look();
        }
        ExchangesHealthy => return one.exchange(20, How::Well),
        ExchangesFailing => return one.exchange(20, How::Badly),
        CallsOfNoWindow => {
            for _ in 0..20 {
                one.ring.push(one.now, true);
            }
            return one.look_at(WindowKind::None);
        }
        ProbeStarted => Event::ProbeStarted {
            row: ROW,
            generation,
        },
        ProbeStartedLate => Event::ProbeStarted {
            row: ROW,
            generation: generation.wrapping_sub(1),
        },
        FirstSuccess => ended(generation, ProbeOutcome::Success),
        LastSuccess => {
            one.handle(ended(generation, ProbeOutcome::Success));
            ended(one.view().generation, ProbeOutcome::Success)
        }
        SuccessLate => ended(generation.wrapping_sub(1), ProbeOutcome::Success),
        ProbeFailed => ended(generation, ProbeOutcome::Failure),
        ProbeFailedLate => ended(generation.wrapping_sub(1), ProbeOutcome::Failure),
        ProbeReturned => ended(generation, ProbeOutcome::Returned),
        ProbeUnanswered => ended(generation, ProbeOutcome::Unanswered),
        ExchangeBroken => broken(one.now),
        ProbeWaits => {
            one.handle(broken(one.now));
            waits(generation)
        }
        LastProbeWaits => {
            one.handle(broken(one.now));
            one.handle(waits(generation));
            waits(one.view().generation)
        }
        DialAnswered | DialFailed => Event::DialEnded {
            target: target(1),
            success: kind == DialAnswered,
        },
        DialAnsweredAfterMisleading | DialAnsweredMuchLater => {
            one.handle(ended(generation, ProbeOutcome::Failure));
            let much_later = kind == DialAnsweredMuchLater;
            one.now = one.now + secs(1) - Nanos(u64::from(!much_later));
            Event::DialEnded {
                target: target(1),
                success: true,
            }
        }
        Refused => Event::Refused {
            row: ROW,
            refused: 1,
        },
        RefusedOften => {
            for refused in [1, 50] {
                one.handle(Event::Refused { row: ROW, refused });
            }
            one.now = one.now + secs(1);
            Event::Refused {
                row: ROW,
                refused: 51,
            }
        }
        Trip => Event::Trip {
            row: ROW,
            until,
            last_seqs,
        },
        HoldClosed => Event::HoldClosed {
            row: ROW,
            until,
            last_seqs,
        },
        Reset => Event::Reset {
            row: ROW,
            last_seqs,
        },
        Lift => Event::Lift {
            row: ROW,
            last_seqs,
        },
        Named => {
            let endpoints = &[endpoint(ROW.index, &[1], 0)];
            one.handle(Event::Groups { endpoints });
            Event::Groups { endpoints: &[] }
        }
        Forget => Event::Forget { row: ROW },
        DeadlineEarly => Event::Deadline,
        DeadlineDue => {
            one.now = one.now + secs(600);
            Event::Deadline
        }
    };
    assert!(
        kinds_of(&event).contains(&kind),
        "{kind:?} is listed with another event"
    );
    one.handle(event);
}

#[test]
fn every_state_meets_every_event() {
    for kind in KINDS {
        for (state, expected) in State::ALL.into_iter().zip(next(kind)) {
            let mut one = One::new(BreakerSettings::default());
            one.bring_to(state);
            meets(one, kind, expected);
        }
    }
}

#[test]
fn every_state_meets_every_event_when_opened_on_exchanges() {
    for kind in KINDS {
        for (state, expected) in State::ALL.into_iter().zip(next_opened_on_exchanges(kind)) {
            let mut one = One::new(BreakerSettings::default());
            one.bring_to_by_exchanges(state);
            meets(one, kind, expected);
        }
    }
}

fn meets(mut one: One, kind: Kind, expected: Option<State>) {
    let view = one.view();
    let (state, generation) = (view.state, view.generation);
    let on_connects = view.reason.window == WindowKind::Connects;
    one.out.clear();
    send(&mut one, kind);

    let got = one.engine.view(ROW, one.now).map(|view| view.state);
    assert_eq!(got, expected, "{state:?} on {kind:?}");

    let (mut at, mut expected_generation) = (state, generation);
    for action in &one.out {
        match *action {
            Action::SetVerdict { verdict, .. } => {
                expected_generation += 1;
                assert_eq!(verdict.generation, expected_generation);
            }
            Action::Transition {
                from,
                to,
                generation,
                ..
            } => {
                assert_eq!(from, at, "{state:?} on {kind:?}");
                assert_ne!(from, to);
                assert_eq!(generation, expected_generation);
                at = to;
            }
            // At once, where it asks whether the server is there.
            Action::Dial { .. } => assert!(
                state == State::Open
                    && match kind {
                        DeadlineDue => on_connects,
                        DeadlineEarly => !on_connects,
                        _ => false,
                    }
            ),
            Action::Bypassed { .. } => panic!("one row is no group"),
            Action::Redialled { answered, .. } => {
                assert_eq!(answered, kind != DialFailed, "{state:?} on {kind:?}");
            }
            Action::Correlated(_) => panic!("one destination is not many"),
        }
    }
    assert_eq!(at, expected.unwrap_or(state), "{state:?} on {kind:?}");
}

#[test]
fn the_list_of_states_is_complete() {
    for (index, state) in State::ALL.into_iter().enumerate() {
        // One arm per state: a new one does not compile before it has a number, and a number
        // beyond the list has no place in it.
        let number = match state {
            State::Closed => 0,
            State::Open => 1,
            State::HalfOpen => 2,
            State::ForcedOpen => 3,
            State::ForcedClosed => 4,
        };
        assert_eq!(number, index);
    }
}

#[test]
fn names_are_the_documented_ones() {
    let states: Vec<_> = State::ALL.into_iter().map(State::as_str).collect();
    assert_eq!(
        states,
        [
            "closed",
            "open",
            "half_open",
            "forced_open",
            "forced_closed"
        ]
    );
    let kinds = [
        ReasonKind::FailureRate,
        ReasonKind::ConsecutiveFailures,
        ReasonKind::SlowCallRate,
        ReasonKind::ProbeFailed,
        ReasonKind::Manual,
        ReasonKind::None,
    ];
    assert_eq!(
        kinds.map(ReasonKind::as_str),
        [
            "failure_rate",
            "consecutive_failures",
            "slow_call_rate",
            "probe_failed",
            "manual",
            "none"
        ]
    );
    let windows = [
        WindowKind::Connects,
        WindowKind::Exchanges,
        WindowKind::None,
    ];
    assert_eq!(
        windows.map(WindowKind::as_str),
        ["connects", "exchanges", "none"]
    );
    assert_eq!(windows.map(WindowKind::index), [Some(0), Some(1), None]);
}
