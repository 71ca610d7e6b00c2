//! Whether this node is really protected: what `backstop doctor` looks at.
//!
//! With an agent, the agent looks ([`node`]): it knows what it meant to do, and asks the kernel what has
//! become of it ([`hooks`]). Without one, the command looks at what a start would need ([`machine`]), by the
//! same checks as `run` makes.

pub mod hooks;
pub mod locks;
pub mod machine;
pub mod memory;
pub mod node;

use crate::control::api::{Check, CheckStatus};

fn check(name: &str, status: CheckStatus, what: String, remedy: Option<String>) -> Check {
    Check {
        name: name.to_owned(),
        status,
        what,
        remedy,
    }
}

/// As it should be.
pub fn ok(name: &str, what: impl Into<String>) -> Check {
    check(name, CheckStatus::Ok, what.into(), None)
}

/// Protected, and something to know.
pub fn warn(name: &str, what: impl Into<String>, remedy: impl Into<String>) -> Check {
    check(name, CheckStatus::Warn, what.into(), Some(remedy.into()))
}

/// Not protected, or not as it was asked for.
pub fn fail(name: &str, what: impl Into<String>, remedy: impl Into<String>) -> Check {
    check(name, CheckStatus::Fail, what.into(), Some(remedy.into()))
}

/// Could not be looked at.
pub fn skip(name: &str, what: impl Into<String>) -> Check {
    check(name, CheckStatus::Skip, what.into(), None)
}

/// Puts the worst first; those that are alike stay in their order.
pub fn worst_first(checks: &mut [Check]) {
    checks.sort_by_key(|check| match check.status {
        CheckStatus::Fail => 0,
        CheckStatus::Warn => 1,
        CheckStatus::Skip => 2,
        CheckStatus::Ok => 3,
    });
}

/// Whether none has failed.
pub fn is_well(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.status != CheckStatus::Fail)
}

/// `a, b and c`.
pub(crate) fn list(of: &[String]) -> String {
    match of {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// The first few of many, and how many more there are.
pub(crate) fn some(of: &[String]) -> String {
    const SHOWN: usize = 4;
    if of.len() <= SHOWN {
        return list(of);
    }
    format!("{} and {} more", of[..SHOWN].join(", "), of.len() - SHOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_come_first_and_keep_their_order() {
        let mut checks = vec![
            ok("a", ""),
            skip("b", ""),
            warn("c", "", ""),
            fail("d", "", ""),
            warn("e", "", ""),
        ];
        assert!(!is_well(&checks));
        worst_first(&mut checks);
        let names: Vec<_> = checks.iter().map(|check| check.name.as_str()).collect();
        assert_eq!(names, ["d", "c", "e", "b", "a"]);
        assert!(is_well(&checks[1..]));
    }

    #[test]
    fn lists() {
        let words = |count: usize| -> Vec<String> {
            ["a", "b", "c", "d", "e", "f"][..count]
                .iter()
                .map(|w| (*w).to_owned())
                .collect()
        };
        assert_eq!(list(&words(0)), "");
        assert_eq!(list(&words(1)), "a");
        assert_eq!(list(&words(3)), "a, b and c");
        assert_eq!(some(&words(4)), "a, b, c and d");
        assert_eq!(some(&words(6)), "a, b, c, d and 2 more");
    }
}
