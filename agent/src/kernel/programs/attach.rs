//! Attaching the programs to a cgroup, and detaching them.

use std::fs::File;

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    programs::{
        CgroupAttachMode, CgroupSkb, CgroupSkbAttachType, CgroupSock, CgroupSockAddr, SockOps,
        cgroup_skb::CgroupSkbLinkId, cgroup_sock::CgroupSockLinkId,
        cgroup_sock_addr::CgroupSockAddrLinkId, sock_ops::SockOpsLinkId,
    },
};

use super::program;

/// Hooks that a cgroup gets, as shown in `attached{hook}`.
pub const HOOKS: [&str; 6] = [
    "connect4",
    "connect6",
    "sock_ops",
    "sock_release",
    "egress",
    "ingress",
];

/// The hook of each of our programs, in the order of [`HOOKS`]: the program's name, and the hook's number in
/// `enum bpf_attach_type` (include/uapi/linux/bpf.h).
const PROGRAMS: [(&str, u32); 6] = [
    ("connect4", 10),
    ("connect6", 11),
    ("follow", 3),
    ("release", 34),
    ("sent", 1),
    ("received", 0),
];

/// One of our programs, and where it belongs.
#[derive(Clone, Copy, Debug)]
pub struct OwnProgram {
    /// Its hook, as in [`HOOKS`].
    pub hook: &'static str,
    /// The hook's number (`enum bpf_attach_type`).
    pub attach_type: u32,
    /// Its name.
    pub name: &'static str,
    /// Its id on this machine; `None` where the kernel does not tell.
    pub id: Option<u32>,
}

/// The programs that every watched cgroup gets.
pub(super) fn own_programs(ebpf: &Ebpf) -> Vec<OwnProgram> {
    let each = HOOKS.into_iter().zip(PROGRAMS);
    each.map(|(hook, (name, attach_type))| OwnProgram {
        hook,
        attach_type,
        name,
        id: ebpf
            .program(name)
            .and_then(|program| Some(program.info().ok()?.id())),
    })
    .collect()
}

/// Links of one cgroup, in the order of attaching; none for a hook that is not attached (yet).
#[derive(Default)]
pub(super) struct Links {
    follow: Option<SockOpsLinkId>,
    release: Option<CgroupSockLinkId>,
    connect4: Option<CgroupSockAddrLinkId>,
    connect6: Option<CgroupSockAddrLinkId>,
    egress: Option<CgroupSkbLinkId>,
    ingress: Option<CgroupSkbLinkId>,
}

/// Attaches every hook, or none.
pub(super) fn attach_all(ebpf: &mut Ebpf, cgroup: &File) -> Result<Links> {
    let mut links = Links::default();
    match attach_each(ebpf, cgroup, &mut links) {
        Ok(()) => Ok(links),
        Err(error) => {
            // aya keeps links of its own accord: what is not detached stays.
            detach_all(ebpf, links);
            Err(error)
        }
    }
}

/// The followers first: a connect that passes the hook must not go unfollowed.
fn attach_each(ebpf: &mut Ebpf, cgroup: &File, links: &mut Links) -> Result<()> {
    let mode = CgroupAttachMode::Single;
    let follow = program::<SockOps>(ebpf, "follow")?.attach(cgroup, mode);
    links.follow = Some(follow.context("attach sock_ops")?);
    let release = program::<CgroupSock>(ebpf, "release")?.attach(cgroup, mode);
    links.release = Some(release.context("attach sock_release")?);
    let (out, back) = (CgroupSkbAttachType::Egress, CgroupSkbAttachType::Ingress);
    let egress = program::<CgroupSkb>(ebpf, "sent")?.attach(cgroup, out, mode);
    links.egress = Some(egress.context("attach egress")?);
    let ingress = program::<CgroupSkb>(ebpf, "received")?.attach(cgroup, back, mode);
    links.ingress = Some(ingress.context("attach ingress")?);
    let connect4 = program::<CgroupSockAddr>(ebpf, "connect4")?.attach(cgroup, mode);
    links.connect4 = Some(connect4.context("attach connect4")?);
    let connect6 = program::<CgroupSockAddr>(ebpf, "connect6")?.attach(cgroup, mode);
    links.connect6 = Some(connect6.context("attach connect6")?);
    Ok(())
}

/// Enforcement goes first, then what follows connects. A link that the kernel has already
/// dissolved, with its cgroup, is as good as detached.
pub(super) fn detach_all(ebpf: &mut Ebpf, links: Links) {
    for (name, link) in [("connect4", links.connect4), ("connect6", links.connect6)] {
        if let (Some(link), Ok(p)) = (link, program::<CgroupSockAddr>(ebpf, name)) {
            let _ = p.detach(link);
        }
    }
    for (name, link) in [("sent", links.egress), ("received", links.ingress)] {
        if let (Some(link), Ok(p)) = (link, program::<CgroupSkb>(ebpf, name)) {
            let _ = p.detach(link);
        }
    }
    if let (Some(link), Ok(p)) = (links.follow, program::<SockOps>(ebpf, "follow")) {
        let _ = p.detach(link);
    }
    if let (Some(link), Ok(p)) = (links.release, program::<CgroupSock>(ebpf, "release")) {
        let _ = p.detach(link);
    }
}
