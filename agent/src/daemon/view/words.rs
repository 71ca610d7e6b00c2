//! What the kernel and the core say, in the words of the interface.

use agent_common::event::{
    OUTCOME_DEADLINE, OUTCOME_READ_TIMEOUT, OUTCOME_STALL, OUTCOME_WRITE_TIMEOUT,
};

use crate::{
    control::api::{self, TimeoutKind},
    core::{BreakerView, Bypass, Reason, ReasonKind, SharedProbe, State, WindowKind},
};

/// Which timeout an outcome is of.
pub fn timeout_kind(outcome: u32) -> TimeoutKind {
    match outcome {
        OUTCOME_READ_TIMEOUT => TimeoutKind::Read,
        OUTCOME_WRITE_TIMEOUT => TimeoutKind::Write,
        OUTCOME_STALL => TimeoutKind::Stall,
        OUTCOME_DEADLINE => TimeoutKind::Deadline,
        _ => TimeoutKind::Connect,
    }
}

/// The state that a row is in: one that follows a half-open breaker is half-open, too.
pub fn shown(view: &BreakerView) -> api::State {
    match view.shared_probe {
        Some(_) if view.state == State::Open => api::State::HalfOpen,
        _ => state(view.state),
    }
}

/// What becomes of the next connect, while half-open.
pub(super) fn probe(view: &BreakerView) -> Option<api::Probe> {
    match (view.shared_probe, view.state) {
        (Some(SharedProbe::Free), State::Open) => Some(api::Probe::Free),
        (Some(SharedProbe::Taken), State::Open) => Some(api::Probe::TakenElsewhere),
        (None, State::HalfOpen) if view.awaits_probe => Some(api::Probe::Free),
        (None, State::HalfOpen) => Some(api::Probe::Taken),
        _ => None,
    }
}

/// A core state in the words of the interface.
pub fn state(state: State) -> api::State {
    match state {
        State::Closed => api::State::Closed,
        State::Open => api::State::Open,
        State::HalfOpen => api::State::HalfOpen,
        State::ForcedOpen => api::State::ForcedOpen,
        State::ForcedClosed => api::State::ForcedClosed,
    }
}

/// Why a breaker is bypassed, in the words of the interface.
pub fn bypass(bypass: Bypass) -> api::Bypass {
    match bypass {
        Bypass::Correlated => api::Bypass::Correlated,
        Bypass::MaxOpenShare => api::Bypass::MaxOpenShare,
    }
}

/// A core reason in the words of the interface.
pub fn reason(reason: Reason) -> api::Reason {
    api::Reason {
        window: window_kind(reason.window),
        kind: match reason.kind {
            ReasonKind::FailureRate => api::ReasonKind::FailureRate,
            ReasonKind::ConsecutiveFailures => api::ReasonKind::ConsecutiveFailures,
            ReasonKind::SlowCallRate => api::ReasonKind::SlowCallRate,
            ReasonKind::ProbeFailed => api::ReasonKind::ProbeFailed,
            ReasonKind::Manual => api::ReasonKind::Manual,
            ReasonKind::None => api::ReasonKind::None,
        },
        value: reason.value,
        threshold: reason.threshold,
    }
}

/// A window in the words of the interface.
pub fn window_kind(kind: WindowKind) -> api::Window {
    match kind {
        WindowKind::Connects => api::Window::Connects,
        WindowKind::Exchanges => api::Window::Exchanges,
        WindowKind::None => api::Window::None,
    }
}
