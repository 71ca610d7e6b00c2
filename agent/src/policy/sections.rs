//! Reads timeouts, breaker, retry and limits, which look alike in the defaults and in a policy.

use std::{ops::RangeInclusive, time::Duration};

use agent_common::window::SLOTS;
use toml::de::DeValue;

use super::{
    duration::format_duration,
    model::{
        Backoff, BreakerPolicy, Errno, Hung, Limits, OnOpen, Policy, ReadAction, RetryPolicy,
        Scope, Stall, Timeouts,
    },
    reader::{Complaint, Found, Section},
    rules::{
        STATUS_ALLOWED, Zero, boolean, duration, is_off, one_of, or_off, ratio, status, whole,
    },
    schema::SectionKeys,
};

pub(super) const TIMEOUTS: &SectionKeys = &[
    "connect",
    "read",
    "write",
    "deadline",
    "stall",
    "keepalive",
    "read_action",
];
pub(super) const BREAKER: &SectionKeys = &[
    "failure_rate",
    "window",
    "window_age",
    "min_calls",
    "consecutive_failures",
    "slow_call",
    "slow_call_rate",
    "hung",
    "gave_up",
    "scope",
    "cooldown",
    "cooldown_max",
    "redial",
    "probes",
    "successes_to_close",
    "max_open_share",
    "failure_status",
    "on_open",
    "errno",
];
pub(super) const RETRY: &SectionKeys = &[
    "limit",
    "budget",
    "window",
    "min_per_second",
    "backoff",
    "max_held",
    "spin_per_second",
    "refuse_non_idempotent",
];
pub(super) const BACKOFF: &SectionKeys = &["base", "max"];
pub(super) const LIMITS: &SectionKeys = &["connections", "pending", "connects_per_second"];

const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
/// For whatever has no bound of its own: beyond a day nobody waits.
const WAIT: RangeInclusive<Duration> = MILLISECOND..=Duration::from_secs(24 * 3600);
/// Below 50 ms one slow timer tick looks like an outage; above 5 min the kernel has given up.
const CONNECT: RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(300);
/// The kernel takes whole seconds up to 32,767 (`MAX_TCP_KEEPIDLE`, include/net/tcp.h).
const KEEPALIVE: RangeInclusive<Duration> = SECOND..=Duration::from_secs(9 * 3600);
const COOLDOWN: RangeInclusive<Duration> = Duration::from_millis(100)..=HOUR;
const AGE: RangeInclusive<Duration> = SECOND..=HOUR;
const MOST_CALLS: u32 = SLOTS as u32;

/// A policy in which every key is still missing.
pub(super) fn blank() -> Policy {
    Policy {
        name: super::DEFAULT_POLICY.to_owned(),
        destinations: Vec::new(),
        workloads: Vec::new(),
        timeouts: Timeouts {
            connect: Duration::ZERO,
            read: None,
            write: None,
            deadline: None,
            stall: Stall::Off,
            keepalive: None,
            read_action: ReadAction::Abort,
        },
        breaker: BreakerPolicy {
            enabled: false,
            failure_rate: None,
            window: 0,
            window_age: Duration::ZERO,
            min_calls: 0,
            consecutive_failures: None,
            slow_call: None,
            slow_call_rate: None,
            hung: Hung::Off,
            gave_up: None,
            scope: Scope::Workload,
            cooldown: Duration::ZERO,
            cooldown_max: Duration::ZERO,
            redial: false,
            probes: 0,
            successes_to_close: 0,
            max_open_share: None,
            failure_status: Vec::new(),
            on_open: OnOpen::Keep,
            errno: Errno::ConnRefused,
        },
        retry: RetryPolicy {
            enabled: false,
            limit: None,
            budget: None,
            window: Duration::ZERO,
            min_per_second: 0,
            backoff: None,
            max_held: 0,
            spin_per_second: None,
            refuse_non_idempotent: false,
        },
        limits: Limits {
            connections: None,
            pending: None,
            connects_per_second: None,
        },
    }
}

/// Reads the four sections of a policy or of the defaults over what `policy` holds.
pub(super) fn read_settings(section: &mut Section<'_, '_>, policy: &mut Policy) {
    if let Some(mut timeouts) = section.table("timeouts", TIMEOUTS) {
        read_timeouts(&mut timeouts, &mut policy.timeouts);
    }
    if is_switched_off(section, "breaker") {
        policy.breaker.enabled = false;
    } else if let Some(mut breaker) = section.table_or_off("breaker", BREAKER) {
        policy.breaker.enabled = true;
        read_breaker(&mut breaker, &mut policy.breaker);
    }
    if is_switched_off(section, "retry") {
        policy.retry.enabled = false;
    } else if let Some(mut retry) = section.table_or_off("retry", RETRY) {
        policy.retry.enabled = true;
        read_retry(&mut retry, &mut policy.retry);
    }
    if let Some(mut limits) = section.table("limits", LIMITS) {
        let rule = || or_off(whole(1..=10_000_000));
        limits.set("connections", &mut policy.limits.connections, rule());
        limits.set("pending", &mut policy.limits.pending, rule());
        limits.set(
            "connects_per_second",
            &mut policy.limits.connects_per_second,
            rule(),
        );
    }
}

fn is_switched_off(section: &Section<'_, '_>, key: &str) -> bool {
    section
        .get(key)
        .is_some_and(|value| is_off(value.get_ref()))
}

fn read_timeouts(section: &mut Section<'_, '_>, timeouts: &mut Timeouts) {
    section.set("connect", &mut timeouts.connect, |value| {
        duration(CONNECT)(value).map_err(|complaint| match is_off(value) {
            true => Complaint {
                what: "cannot be switched off".to_owned(),
                ..complaint
            },
            false => complaint,
        })
    });
    section.set("read", &mut timeouts.read, or_off(duration(WAIT)));
    section.set("write", &mut timeouts.write, or_off(duration(WAIT)));
    section.set("deadline", &mut timeouts.deadline, or_off(duration(WAIT)));
    section.set("stall", &mut timeouts.stall, |value| {
        auto_or_off(value, Stall::Auto, Stall::Off, Stall::After)
    });
    section.set(
        "keepalive",
        &mut timeouts.keepalive,
        or_off(duration(KEEPALIVE)),
    );
    section.set(
        "read_action",
        &mut timeouts.read_action,
        one_of(&[("abort", ReadAction::Abort), ("option", ReadAction::Option)]),
    );
}

/// "auto", "off" or a wait.
fn auto_or_off<T>(
    value: &DeValue<'_>,
    auto: T,
    off: T,
    after: impl FnOnce(Duration) -> T,
) -> Result<T, Complaint> {
    if one_of(&[("auto", ())])(value).is_ok() {
        return Ok(auto);
    }
    match or_off(duration(WAIT))(value) {
        Ok(None) => Ok(off),
        Ok(Some(wait)) => Ok(after(wait)),
        Err(complaint) => Err(Complaint {
            allowed: format!("\"auto\", {}", complaint.allowed),
            ..complaint
        }),
    }
}

fn read_breaker(section: &mut Section<'_, '_>, breaker: &mut BreakerPolicy) {
    section.set(
        "failure_rate",
        &mut breaker.failure_rate,
        or_off(ratio(Zero::Refused)),
    );
    let window = section.set("window", &mut breaker.window, whole(1..=MOST_CALLS));
    section.set("window_age", &mut breaker.window_age, duration(AGE));
    let min_calls = section.set("min_calls", &mut breaker.min_calls, whole(1..=MOST_CALLS));
    section.set(
        "consecutive_failures",
        &mut breaker.consecutive_failures,
        |value| {
            let read = or_off(whole(0..=MOST_CALLS))(value)?;
            Ok(read.filter(|failures| *failures > 0))
        },
    );
    section.set("slow_call", &mut breaker.slow_call, or_off(duration(WAIT)));
    section.set(
        "slow_call_rate",
        &mut breaker.slow_call_rate,
        or_off(ratio(Zero::Refused)),
    );
    section.set("hung", &mut breaker.hung, |value| {
        auto_or_off(value, Hung::Auto, Hung::Off, Hung::After)
    });
    section.set("gave_up", &mut breaker.gave_up, or_off(duration(WAIT)));
    section.set(
        "scope",
        &mut breaker.scope,
        one_of(&[("workload", Scope::Workload), ("node", Scope::Node)]),
    );
    let cooldown = section.set("cooldown", &mut breaker.cooldown, duration(COOLDOWN));
    let cooldown_max = section.set(
        "cooldown_max",
        &mut breaker.cooldown_max,
        duration(COOLDOWN),
    );
    section.set("redial", &mut breaker.redial, boolean);
    section.set("probes", &mut breaker.probes, whole(1..=1000));
    section.set(
        "successes_to_close",
        &mut breaker.successes_to_close,
        whole(1..=1000),
    );
    section.set(
        "max_open_share",
        &mut breaker.max_open_share,
        or_off(ratio(Zero::Allowed)),
    );
    read_failure_status(section, breaker);
    section.set(
        "on_open",
        &mut breaker.on_open,
        one_of(&[
            ("keep", OnOpen::Keep),
            ("drain-idle", OnOpen::DrainIdle),
            ("abort", OnOpen::Abort),
        ]),
    );
    let errnos = Errno::ALL.map(|errno| (errno.as_str(), errno));
    section.set("errno", &mut breaker.errno, one_of(&errnos));

    // Two values that must fit one another: the one that is written here is at fault.
    if worth_comparing(window, min_calls) && breaker.window < breaker.min_calls {
        let (calls, min) = (breaker.window, breaker.min_calls);
        if window == Found::Good {
            let what = format!("is less than min_calls = {min}, so no rate would ever be judged");
            let allowed =
                format!("a whole number from {min} to {MOST_CALLS}, or a smaller min_calls");
            section.complain("window", Complaint::new(what, allowed));
        } else {
            let what = format!("is more than window = {calls}, so no rate would ever be judged");
            let allowed = format!("a whole number from 1 to {calls}, or a larger window");
            section.complain("min_calls", Complaint::new(what, allowed));
        }
    }
    if worth_comparing(cooldown, cooldown_max) && breaker.cooldown_max < breaker.cooldown {
        let (first, last) = (
            format_duration(breaker.cooldown),
            format_duration(breaker.cooldown_max),
        );
        if cooldown_max == Found::Good {
            let what = format!("is less than cooldown = {first}");
            let allowed = format!(
                "a duration from {first} to {}",
                format_duration(*COOLDOWN.end())
            );
            section.complain("cooldown_max", Complaint::new(what, allowed));
        } else {
            let what = format!("is more than cooldown_max = {last}");
            let allowed = format!("a duration up to {last}, or a larger cooldown_max");
            section.complain("cooldown", Complaint::new(what, allowed));
        }
    }
}

/// Whether two values that must fit one another can be to blame here: not if one of them was
/// reported already, nor if both come from somewhere else.
fn worth_comparing(one: Found, other: Found) -> bool {
    !matches!(
        (one, other),
        (Found::Bad, _) | (_, Found::Bad) | (Found::Absent, Found::Absent)
    )
}

fn read_failure_status(section: &mut Section<'_, '_>, breaker: &mut BreakerPolicy) {
    if is_switched_off(section, "failure_status") {
        breaker.failure_status = Vec::new();
        return;
    }
    let allowed = format!("a list of {STATUS_ALLOWED}, or \"off\"");
    if let Some(statuses) = section.list("failure_status", &allowed, status) {
        breaker.failure_status = statuses;
    }
}

fn read_retry(section: &mut Section<'_, '_>, retry: &mut RetryPolicy) {
    section.set("limit", &mut retry.limit, or_off(whole(0..=100)));
    section.set("budget", &mut retry.budget, or_off(ratio(Zero::Allowed)));
    section.set("window", &mut retry.window, duration(AGE));
    section.set(
        "min_per_second",
        &mut retry.min_per_second,
        whole(0..=1_000_000),
    );
    read_backoff(section, &mut retry.backoff);
    section.set("max_held", &mut retry.max_held, whole(0..=1_000_000));
    section.set(
        "spin_per_second",
        &mut retry.spin_per_second,
        or_off(whole(1..=1_000_000)),
    );
    section.set(
        "refuse_non_idempotent",
        &mut retry.refuse_non_idempotent,
        boolean,
    );
}

fn read_backoff(section: &mut Section<'_, '_>, target: &mut Option<Backoff>) {
    const RANGE: RangeInclusive<Duration> = MILLISECOND..=HOUR;
    if is_switched_off(section, "backoff") {
        *target = None;
        return;
    }
    let inherited = *target;
    let Some(mut table) = section.table_or_off("backoff", BACKOFF) else {
        return;
    };
    let mut backoff = inherited.unwrap_or(Backoff {
        base: MILLISECOND,
        max: *RANGE.end(),
    });
    for key in BACKOFF {
        if inherited.is_none() && table.get(key).is_none() {
            let allowed = "both, like { base = \"100ms\", max = \"10s\" }, or \"off\"";
            table.complain(key, Complaint::new("is missing", allowed));
        }
    }
    let base = table.set("base", &mut backoff.base, duration(RANGE));
    let max = table.set("max", &mut backoff.max, duration(RANGE));
    if worth_comparing(base, max) && backoff.max < backoff.base {
        let (first, last) = (format_duration(backoff.base), format_duration(backoff.max));
        let (key, what) = match max {
            Found::Good => ("max", format!("is less than base = {first}")),
            _ => ("base", format!("is more than max = {last}")),
        };
        table.complain(key, Complaint::new(what, "base at most max"));
    }
    *target = Some(backoff);
}
