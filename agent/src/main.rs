//! The `backstop` command.

fn main() {}
