//! Taking the debug sections out of the object. BTF, which the kernel and aya read, stays.

use anyhow::{Context as _, Result};
use object::build::elf::{Builder, SectionData};
use object::elf::SHT_STRTAB;

/// Returns the object without `.debug_*` sections and their relocations.
///
/// # Errors
/// When the bytes are no ELF object, or the result cannot be written.
pub fn strip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut builder = Builder::read(bytes).context("read the object as ELF")?;
    for section in &mut builder.sections {
        let name = String::from_utf8_lossy(&section.name).into_owned();
        section.delete = is_debug(&name);
    }
    builder.delete_orphans();
    // LLVM keeps the names of sections and symbols in one table; the writer wants two.
    if !builder
        .sections
        .iter()
        .any(|section| matches!(section.data, SectionData::SectionString))
    {
        let names = builder.sections.add();
        names.name = ".shstrtab".into();
        names.sh_type = SHT_STRTAB;
        names.sh_addralign = 1;
        names.data = SectionData::SectionString;
    }
    let mut stripped = Vec::new();
    builder
        .write(&mut stripped)
        .context("write the stripped object")?;
    Ok(stripped)
}

fn is_debug(section: &str) -> bool {
    let name = section.strip_prefix(".rel").unwrap_or(section);
    name.starts_with(".debug_")
}
