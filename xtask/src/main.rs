//! Build, test and measuring commands.
fn main() {}
