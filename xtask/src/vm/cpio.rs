//! Writing cpio archives of the kind "newc", which the kernel unpacks as its first root
//! (Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's source).

use std::io::{self, Write};

/// File types, as in `st_mode`.
const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// The entry that ends an archive.
const TRAILER: &str = "TRAILER!!!";

/// Entries start, and their data start, at a multiple of this many bytes.
const ALIGNMENT: usize = 4;

/// Writes an archive entry by entry. Everything belongs to root and is dated 0, so that the same
/// entries give the same bytes.
#[derive(Debug)]
pub struct Archive<W: Write> {
    out: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// Begins an archive.
    pub fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    /// Adds a folder; its parent must have been added before.
    ///
    /// # Errors
    /// When writing fails.
    pub fn directory(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Adds a file that everybody may read and run.
    ///
    /// # Errors
    /// When writing fails or the data exceed 4 GiB.
    pub fn file(&mut self, name: &str, data: &[u8]) -> io::Result<()> {
        self.entry(name, FILE | 0o755, (0, 0), data)
    }

    /// Adds a symbolic link to `target`.
    ///
    /// # Errors
    /// When writing fails.
    pub fn link(&mut self, name: &str, target: &str) -> io::Result<()> {
        self.entry(name, LINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a character device.
    ///
    /// # Errors
    /// When writing fails.
    pub fn device(&mut self, name: &str, major: u32, minor: u32) -> io::Result<()> {
        self.entry(name, CHARACTER_DEVICE | 0o600, (major, minor), &[])
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// When writing fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry(TRAILER, 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), data: &[u8]) -> io::Result<()> {
        let too_big = |_| io::Error::new(io::ErrorKind::InvalidInput, "over 4 GiB for one entry");
        let size = u32::try_from(data.len()).map_err(too_big)?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_big)?;
        let links = if mode & DIRECTORY == DIRECTORY && mode & FILE == 0 {
            2
        } else {
            1
        };
        let fields = [
            self.inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0,
        ];
        self.inode += 1;
        let mut head = String::from("070701");
        for field in fields {
            head.push_str(&format!("{field:08X}"));
        }
        head.push_str(name);
        head.push('\0');
        self.padded(head.as_bytes())?;
        self.padded(data)
    }

    fn padded(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        let over = bytes.len() % ALIGNMENT;
        if over > 0 {
            self.out.write_all(&[0; ALIGNMENT][over..])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Archive;

    #[test]
    fn an_entry_has_the_documented_form() {
        let mut archive = Archive::new(Vec::new());
        archive.file("ab", b"hello").unwrap();
        let bytes = archive.finish().unwrap();
        let head = "070701\
            00000000\
            000081ED\
            00000000\
            00000000\
            00000001\
            00000000\
            00000005\
            00000000\
            00000000\
            00000000\
            00000000\
            00000003\
            00000000";
        assert_eq!(head.len(), 110);
        assert_eq!(&bytes[..110], head.as_bytes());
        // 110 + 3 bytes of name end at 113: three bytes up to the next multiple of four.
        assert_eq!(&bytes[110..116], b"ab\0\0\0\0");
        assert_eq!(&bytes[116..124], b"hello\0\0\0");
        assert_eq!(&bytes[124..130], b"070701");
    }

    #[test]
    fn cpio_itself_would_find_every_entry_aligned() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("a").unwrap();
        archive.link("a/longer", "target").unwrap();
        archive.device("a/console", 5, 1).unwrap();
        archive.file("a/x", &[7; 9]).unwrap();
        let bytes = archive.finish().unwrap();
        let (mut at, mut names) = (0, Vec::new());
        while at < bytes.len() {
            let field = |index: usize| {
                let start = at + 6 + index * 8;
                let text = std::str::from_utf8(&bytes[start..start + 8]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            assert_eq!(&bytes[at..at + 6], b"070701");
            let (size, name_size) = (field(6), field(11));
            let name = &bytes[at + 110..at + 110 + name_size - 1];
            names.push(String::from_utf8(name.to_vec()).unwrap());
            at = (at + 110 + name_size).next_multiple_of(4);
            at = (at + size).next_multiple_of(4);
        }
        assert_eq!(names, ["a", "a/longer", "a/console", "a/x", "TRAILER!!!"]);
    }
}
