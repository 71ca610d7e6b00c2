//! `cargo xtask ebpf`: rebuilds the committed kernel object.
//!
//! The result depends on nothing but the kernel sources, the compiler, the linker and the source
//! of `core`: paths are remapped, debug sections removed (BTF stays), and the record beside the
//! object says what it was made from, so that `cargo xtask check` can tell when it is stale.

mod build;
mod core_source;
mod record;
mod strip;
mod toolchain;
pub mod wrapper;

use std::fs;

use anyhow::{Context as _, Result};

pub use build::build;
pub use core_source::CoreSource;
pub use record::{Inputs, Record, sha256};
pub use toolchain::Toolchain;

use crate::paths;

/// Everything that is needed to build the object.
#[derive(Debug)]
pub struct Tools {
    /// The nightly compiler and the linker.
    pub toolchain: Toolchain,
    /// The source of `core` that is compiled for the kernel's target.
    pub core: CoreSource,
}

impl Tools {
    /// Finds the tools, fetching what is missing.
    ///
    /// # Errors
    /// When there is no nightly compiler, or something is missing and cannot be fetched.
    pub fn obtain() -> Result<Self> {
        let toolchain = Toolchain::obtain()?;
        let core = CoreSource::obtain(&toolchain)?;
        Ok(Self { toolchain, core })
    }

    /// The tools, if all of them are on this machine already; fetches nothing.
    pub fn at_hand() -> Option<Self> {
        let toolchain = Toolchain::at_hand()?;
        let core = CoreSource::at_hand(&toolchain)?;
        Some(Self { toolchain, core })
    }
}

/// Runs the command.
///
/// # Errors
/// When a tool is missing, the build fails, or the object would hold a name of this machine.
pub fn run() -> Result<()> {
    let tools = Tools::obtain()?;
    println!("compiler: {}", tools.toolchain.rustc);
    println!("linker: {}", tools.toolchain.linker_version);
    println!("core: {}", tools.core.describe());

    let bytes = build(&tools)?;
    let record = Record::of(&bytes, &tools)?;
    let object = paths::object();
    let folder = object.parent().context("the object's path has no folder")?;
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;

    let unchanged = fs::read(&object).is_ok_and(|old| old == bytes);
    fs::write(&object, &bytes).with_context(|| format!("write {}", object.display()))?;
    record.write()?;
    let state = if unchanged { "unchanged" } else { "new" };
    println!(
        "{}: {} bytes, {state}, sha256 {}",
        object.display(),
        bytes.len(),
        record.object_sha256
    );
    Ok(())
}
