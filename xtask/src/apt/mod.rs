//! Debian packages: which are needed and why, installed only where missing; and packages that are
//! looked into but never installed (kernels, the source of `core`).

pub mod archive;
pub mod packages;
mod sources;
