//! Dial schedules and the node's limit.

use std::collections::HashMap;

use super::*;

/// Opens that many breakers, row i for `target(to(i))`, at `now`.
fn opened(rows: u32, to: impl Fn(u32) -> u32, now: Nanos) -> (Engine, Vec<Action>) {
    let mut engine = Engine::new(3);
    let mut out = Vec::new();
    let settings = Arc::new(BreakerSettings {
        cooldown: secs(10_000),
        ..BreakerSettings::default()
    });
    let mut ring = Ring::new();
    for _ in 0..5 {
        ring.push(now, true);
    }
    for index in 0..rows {
        engine.handle(
            Event::Configure {
                row: row(index),
                target: target(to(index)),
                settings: settings.clone(),
                generation: 0,
            },
            now,
            &mut out,
        );
        engine.handle(
            Event::Calls {
                row: row(index),
                kind: WindowKind::Connects,
                last_seq: 5,
                window: &ring.window,
            },
            now,
            &mut out,
        );
    }
    assert_eq!(out.len(), 2 * rows as usize);
    out.clear();
    (engine, out)
}

/// Runs deadlines until `end`; each dial is answered `after` it went out (never: `None`).
/// Returns when which target was dialled.
fn run(
    engine: &mut Engine,
    mut now: Nanos,
    end: Nanos,
    after: Option<Nanos>,
) -> Vec<(Nanos, DialTarget)> {
    let mut dials = Vec::new();
    let mut answers: Vec<(Nanos, DialTarget)> = Vec::new();
    let mut out = Vec::new();
    loop {
        let answer = answers.first().map(|&(at, _)| at);
        let Some(at) = [answer, engine.next_deadline()].into_iter().flatten().min() else {
            return dials;
        };
        if at > end {
            return dials;
        }
        now = now.max(at);
        if answer == Some(at) {
            let (_, target) = answers.remove(0);
            let event = Event::DialEnded {
                target,
                success: false,
            };
            engine.handle(event, now, &mut out);
        } else {
            engine.handle(Event::Deadline, now, &mut out);
        }
        for action in out.drain(..) {
            let Action::Dial { target } = action else {
                panic!("a failed dial changes nothing, got {action:?}");
            };
            dials.push((now, target));
            answers.extend(after.map(|after| (now + after, target)));
        }
    }
}

fn gaps(dials: &[(Nanos, DialTarget)]) -> Vec<u64> {
    dials
        .windows(2)
        .map(|pair| (pair[1].0 - pair[0].0).as_millis())
        .collect()
}

#[test]
fn the_schedule_slows_down_as_the_outage_lasts() {
    let start = secs(1000);
    let (mut engine, _) = opened(1, |_| 1, start);
    let dials = run(&mut engine, start, start + secs(1200), Some(millis(1)));
    for (&(at, _), gap) in dials.iter().zip(gaps(&dials)) {
        let expected = match (at - start).as_millis() {
            0..60_000 => 400..=600,
            60_000..600_000 => 1600..=2400,
            _ => 3200..=4800,
        };
        assert!(expected.contains(&gap), "{gap} ms at {at:?}");
    }
    let first_minute = dials.iter().filter(|(at, _)| *at - start < secs(60));
    assert!((100..=150).contains(&first_minute.count()));
    // Jitter goes both ways.
    assert!(gaps(&dials).iter().any(|&gap| gap < 470));
    assert!(gaps(&dials)[..50].iter().any(|&gap| gap > 530));
}

#[test]
fn rows_of_one_target_share_its_dials_and_its_answer() {
    let start = secs(1000);
    let (mut engine, mut out) = opened(500, |index| index % 2, start);
    let dials = run(&mut engine, start, start + secs(1), Some(millis(1)));
    assert!((2..=4).contains(&dials.len()), "{dials:?}");
    let now = start + secs(2);
    engine.handle(
        Event::DialEnded {
            target: target(0),
            success: true,
        },
        now,
        &mut out,
    );
    for index in 0..500 {
        let expected = [State::HalfOpen, State::Open][index as usize % 2];
        assert_eq!(engine.view(row(index), now).unwrap().state, expected);
    }
    // Half-open rows are dialled no more, the others are.
    let later = run(&mut engine, now, now + secs(2), Some(millis(1)));
    assert!(!later.is_empty() && later.iter().all(|&(_, to)| to == target(1)));
}

#[test]
fn a_dial_in_flight_keeps_the_next_one_back_until_it_is_written_off() {
    let start = secs(1000);
    let (mut engine, _) = opened(1, |_| 1, start);
    // Slow answers: the next dial goes out when the answer is there.
    let slow = run(&mut engine, start, start + secs(20), Some(secs(2)));
    assert!(gaps(&slow).iter().all(|&gap| gap == 2000), "{slow:?}");
    // No answers at all.
    let (mut engine, _) = opened(1, |_| 1, start);
    let lost = run(&mut engine, start, start + secs(65), None);
    assert!(gaps(&lost).iter().all(|&gap| gap == 10_000), "{lost:?}");
    assert_eq!(lost.len(), 7);
}

#[test]
fn a_dial_in_flight_is_not_doubled_by_an_outage_that_begins_anew() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    one.now = one.view().next_redial_at.unwrap();
    one.handle(Event::Deadline);
    assert!(matches!(one.out.last(), Some(Action::Dial { .. })));
    one.handle(Event::Reset {
        row: ROW,
        last_seqs: one.last_seqs(),
    });
    one.calls(5, true);
    assert_eq!(one.state(), State::Open);
    one.out.clear();
    let dialled = one.now;
    one.now = dialled + secs(10) - Nanos(1);
    one.handle(Event::Deadline);
    assert_eq!(one.out, []);
    one.now = dialled + secs(10);
    one.handle(Event::Deadline);
    assert!(matches!(one.out[..], [Action::Dial { .. }]));
}

#[test]
fn nothing_is_dialled_for_an_operator_or_when_switched_off() {
    for settings in [
        BreakerSettings {
            redial: false,
            ..BreakerSettings::default()
        },
        BreakerSettings::default(),
    ] {
        let mut one = One::new(settings.clone());
        one.bring_to(State::Open);
        if settings.redial {
            let until = one.now + secs(60);
            one.handle(Event::Trip {
                row: ROW,
                until,
                last_seqs: [0; 2],
            });
        }
        assert_eq!(one.view().next_redial_at, None);
        let before = one.state();
        one.pass(secs(20));
        one.dial_ended(true);
        assert_eq!(one.state(), before);
        assert!(!one.out.iter().any(|a| matches!(a, Action::Dial { .. })));
    }
}

#[test]
fn the_node_dials_at_most_200_times_a_second_and_nobody_starves() {
    let start = secs(1000);
    let (mut engine, _) = opened(1000, |index| index, start);
    let dials = run(&mut engine, start, start + secs(30), Some(millis(1)));
    let mut first = 0;
    for (index, &(at, _)) in dials.iter().enumerate() {
        while at - dials[first].0 >= secs(1) {
            first += 1;
        }
        assert!(index - first < MAX_DIALS_PER_SECOND as usize, "at {at:?}");
    }
    assert!(dials.len() > 30 * 180, "only {} dials", dials.len());
    let mut last = HashMap::new();
    for &(at, target) in &dials {
        let gap = at - last.insert(target, at).unwrap_or(start);
        assert!(gap < secs(7), "{gap:?} without a dial");
    }
    assert_eq!(last.len(), 1000);
}

#[test]
fn many_timers_at_once_are_met_in_bounded_calls() {
    let start = secs(1000);
    let (mut engine, mut out) = opened(2000, |_| 1, start);
    let now = start + secs(10_000);
    let mut calls = 0;
    while engine.next_deadline().is_some_and(|at| at <= now) {
        engine.handle(Event::Deadline, now, &mut out);
        // A verdict and a transition for each of 512 rows, and a dial.
        assert!(
            out.len() <= 2 * 512 + 1,
            "{} actions in one call",
            out.len()
        );
        out.clear();
        calls += 1;
    }
    assert!(calls <= 5, "{calls} calls");
    for index in 0..2000 {
        assert_eq!(engine.view(row(index), now).unwrap().state, State::HalfOpen);
    }
}
