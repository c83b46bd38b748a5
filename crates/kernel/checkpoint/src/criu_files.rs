//! Files of criu in an image: pagemaps and files of pages, which criu reads at a restore, and those with its sockets.
//! The first are made from the image each time, so that only the image is ever trusted.

use crate::error::ErrorContext;
use crate::store::is_derived;
use crate::{Error, Image};
use serde::{Deserialize, Serialize};
use std::os::unix::fs::{FileExt, symlink};
use stillpoint_base::PAGE;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_criu::page_server::{Form, PE_LAZY, PE_PRESENT};
use stillpoint_kernel_criu::pagemap::{Gaps, Pages, encode};
use stillpoint_kernel_criu::tcp::{Connection, connections};
use stillpoint_kernel_foam::{Extent, LAZY, Object, PRESENT, Placement, Recorded};

/// Time at which memory is restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum RestoreMode {
    /// On demand when a thread faults, and in the background.
    ///
    /// Pages that cannot wait are there before the process runs.
    OnDemand,
    /// All of it before any program runs.
    Eager,
}

/// Limit in bytes for a file of criu that is read as a whole.
pub(crate) const CRIU_FILE_BYTES_MAX: u64 = 1 << 30;

/// Reads `files.img` of an image: open files and sockets.
pub(crate) fn read_files_image(directory: &Directory) -> Result<Vec<u8>, Error> {
    Ok(directory.read("files.img", CRIU_FILE_BYTES_MAX)?)
}

/// Returns the established TCP connections of an image.
pub(crate) fn connections_of(directory: &Directory) -> Result<Vec<Connection>, Error> {
    Ok(connections(&read_files_image(directory)?)?)
}

/// Writes the files that criu reads into the image's directory.
///
/// # Errors
/// A file cannot be made, or a page is damaged.
pub(crate) fn write_criu_files(image: &Image, restore: RestoreMode, form: Form) -> Result<(), Error> {
    // made by an earlier restore, or delivered with the image
    for name in image.directory().names()?.iter().filter(|name| is_derived(name)) {
        image.directory().remove(name)?;
    }
    for (number, recorded) in (1u32..).zip(&image.index().memories) {
        let pagemap = match recorded.object {
            Object::Task(pid) => format!("pagemap-{pid}.img"),
            Object::Shmem(id) => format!("pagemap-shmem-{id}.img"),
        };
        let gap_encoding = gap_encoding(recorded, restore);
        let ranges = recorded.extents.iter().map(|extent| page_range(extent, restore));
        let bytes = encode(form, number, gap_encoding.unwrap_or(Gaps::Closed), ranges);
        image.directory().create(&pagemap)?.write_all_at(&bytes, 0).at("write", image.dir().join(pagemap))?;
        let pages = format!("pages-{number}.img");
        match gap_encoding {
            Some(_) => {
                let path = image.dir().join(pages);
                symlink(recorded.object.file_name(), &path).at("link", &path)?;
            }
            None => copy_pages(image, recorded, restore, &pages)?,
        }
    }
    Ok(())
}

/// Returns true if criu reads these pages out of the image by itself. All others are compared with their checksums when
/// they are copied for it, or fetched.
pub(crate) fn is_read_by_criu(recorded: &Recorded, extent: &Extent, restore: RestoreMode) -> bool {
    gap_encoding(recorded, restore).is_some() && !(extent.is_lazy() && restore == RestoreMode::OnDemand)
}

/// Returns the way to describe gaps to criu if the image itself can be its file of pages; `None` if it cannot.
fn gap_encoding(recorded: &Recorded, restore: RestoreMode) -> Option<Gaps> {
    if recorded.placement != Placement::Sparse {
        return None;
    }
    let mut end = 0;
    let is_whole = recorded.extents.iter().all(|extent| {
        let follows = extent.start == end && extent.flags & PRESENT != 0;
        end = extent.end();
        follows
    });
    match (is_whole, restore, recorded.object) {
        (true, _, _) => Some(Gaps::Closed),
        // criu skips lazy pages that no memory requests, when it restores lazily
        (false, RestoreMode::OnDemand, Object::Task(_)) => Some(Gaps::Named),
        _ => None,
    }
}

fn page_range(extent: &Extent, restore: RestoreMode) -> Pages {
    let lazy = if extent.flags & LAZY != 0 && restore == RestoreMode::OnDemand { PE_LAZY } else { 0 };
    let present = if extent.flags & PRESENT != 0 { PE_PRESENT } else { 0 };
    Pages { start: extent.start, pages: extent.pages, flags: lazy | present }
}

/// Copies one stored page after another; a page that criu leaves to us becomes a hole.
fn copy_pages(image: &Image, recorded: &Recorded, restore: RestoreMode, name: &str) -> Result<(), Error> {
    let file = image.directory().create(name)?;
    let path = image.dir().join(name);
    let (mut place, mut buffer) = (0, vec![0; 1 << 20]);
    for extent in recorded.extents.iter().filter(|extent| extent.flags & PRESENT != 0) {
        let skipped = extent.is_lazy() && restore == RestoreMode::OnDemand;
        let mut at = extent.start;
        while at < extent.end() && !skipped {
            let part = &mut buffer[..(extent.end() - at).min(1 << 20) as usize];
            image.read(recorded.object, at, part)?;
            file.write_all_at(part, place + (at - extent.start)).at("write", &path)?;
            at += part.len() as u64;
        }
        place += extent.pages * PAGE;
    }
    file.set_len(place).at("extend", path)
}
