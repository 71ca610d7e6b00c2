//! A chain of services A, B, C, D in which each asks the next one twice: what a failure of D multiplies to.

#![expect(
    clippy::print_stdout,
    reason = "figures for docs/RETRIES.md, shown by --nocapture"
)]

use tests::truth::chain::{BUDGETS_ALONE, load_on_d};

/// Calls of A by its user, one after the other.
const CALLS: u64 = 300;

#[test]
fn budgets_alone_keep_a_chain_from_multiplying() {
    let [without, budgets, all] =
        [None, Some(BUDGETS_ALONE), Some("")].map(|config| load_on_d(config, 100, CALLS));
    println!(
        "load on D: {without:.2} without, {budgets:.2} with budgets alone, {all:.2} with everything"
    );
    assert!(without > 7.9, "{without}");
    assert!(budgets <= 1.35, "{budgets}");
    assert!(all <= 1.35, "{all}");
}
