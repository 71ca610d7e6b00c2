//! The committed kernel object is what its sources say.

use std::fs;

use anyhow::{Context as _, bail};

use super::Outcome;
use crate::ebpf::{self, Inputs, Record, Tools};
use crate::paths;

/// How to make the object current.
const ADVICE: &str = "run `cargo xtask ebpf` and commit agent-ebpf/object";

/// Compares the record with the object, the sources, the flags and the package versions.
pub fn sources() -> Outcome {
    let record = Record::read()?;
    let object = paths::object();
    let bytes = fs::read(&object).with_context(|| format!("read {}", object.display()))?;
    let mut problems = Vec::new();
    if ebpf::sha256(&bytes) != record.object_sha256 {
        problems.push("the object is not the recorded one");
    }
    let now = Inputs::now()?;
    if now.sources_sha256 != record.inputs.sources_sha256 {
        problems.push("the kernel sources changed since it was built");
    }
    if now.flags != record.inputs.flags {
        problems.push("the compiler's flags changed since it was built");
    }
    if now.packages != record.inputs.packages {
        problems.push("Cargo.lock names other versions of aya-ebpf or bytemuck");
    }
    if !problems.is_empty() {
        bail!("{}; {ADVICE}", problems.join("; "));
    }
    Ok(String::new())
}

/// Rebuilds the object and compares bytes, where the tools of the record are at hand.
pub fn rebuild() -> Outcome {
    let record = Record::read()?;
    let Some(tools) = Tools::at_hand() else {
        return Ok(
            "not compared: nightly, bpf-linker or the source of core is not here".to_owned(),
        );
    };
    if !record.same_tools(&tools)? {
        return Ok(format!(
            "not compared: the tools here ({}, {}, {}) are not the recorded ones",
            tools.toolchain.rustc, tools.toolchain.linker_version, tools.core.origin
        ));
    }
    let bytes = ebpf::build(&tools)?;
    let object = paths::object();
    let committed = fs::read(&object).with_context(|| format!("read {}", object.display()))?;
    if bytes != committed {
        bail!(
            "a new build gives other bytes than {}; {ADVICE}",
            object.display()
        );
    }
    Ok(format!("{} bytes, the same", bytes.len()))
}
