//! The hooks on getsockopt and setsockopt: loaded and attached only while a policy has options set from
//! outside, because every such call of every watched program runs them.

use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    programs::{
        CgroupAttachMode, CgroupSockopt, ProgramError, cgroup_sockopt::CgroupSockoptLinkId,
    },
};

use super::programs::program;

/// In the order of attaching: what programs set must be noted before they are told anything.
const PROGRAMS: [&str; 2] = ["chooses", "reads_back"];

/// See the module.
#[derive(Default)]
pub(super) struct SockoptHooks {
    is_wanted: bool,
    links: HashMap<PathBuf, Vec<(&'static str, CgroupSockoptLinkId)>>,
}

impl SockoptHooks {
    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// Says whether they are wanted, for these cgroups; attaches or detaches.
    pub(super) fn want<'a>(
        &mut self,
        ebpf: &mut Ebpf,
        is_wanted: bool,
        cgroups: impl Iterator<Item = &'a Path>,
    ) -> Result<()> {
        if self.is_wanted == is_wanted {
            return Ok(());
        }
        self.is_wanted = is_wanted;
        if is_wanted {
            for path in cgroups {
                self.attach(ebpf, path)?;
            }
        } else {
            let paths: Vec<PathBuf> = self.links.keys().cloned().collect();
            for path in paths {
                self.detach(ebpf, &path);
            }
        }
        Ok(())
    }

    /// Attaches to one cgroup.
    pub(super) fn attach(&mut self, ebpf: &mut Ebpf, path: &Path) -> Result<()> {
        let directory = File::open(path).with_context(|| format!("open {}", path.display()))?;
        for name in PROGRAMS {
            let hook = program::<CgroupSockopt>(ebpf, name)?;
            match hook.load() {
                Ok(()) | Err(ProgramError::AlreadyLoaded) => {}
                Err(error) => return Err(error).with_context(|| format!("load {name}")),
            }
            let link = hook
                .attach(&directory, CgroupAttachMode::Single)
                .with_context(|| format!("attach {name} to {}", path.display()))?;
            self.links
                .entry(path.to_owned())
                .or_default()
                .push((name, link));
        }
        Ok(())
    }

    /// Detaches from one cgroup, if attached.
    pub(super) fn detach(&mut self, ebpf: &mut Ebpf, path: &Path) {
        for (name, link) in self.links.remove(path).into_iter().flatten() {
            if let Ok(hook) = program::<CgroupSockopt>(ebpf, name) {
                // Dissolved by the kernel, with its cgroup: as good as detached.
                let _ = hook.detach(link);
            }
        }
    }
}
