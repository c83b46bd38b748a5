//! Debian's slapd with a thousand records, and changes of ours to it.

use super::{Change, Daemon, Package};
use crate::Unavailable;
use crate::packages::Binary;
use crate::server::Server;
use std::ffi::OsString;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use stillpoint_measure::load::{Plan, Protocol, Target};

/// Number of records.
pub const RECORDS: u64 = 1_000;
/// Name of the entry above all records.
pub const BASE: &str = "dc=example,dc=org";
/// Path of the executable below the root.
pub const PROGRAM: &str = "usr/sbin/slapd";

const BACKEND: &str = "usr/lib/ldap/back_mdb-2.5.so.0";
const LIBRARY: &str = "usr/lib/x86_64-linux-gnu/libldap-2.5.so.0";

/// Quiescence points: their directory in `crates/patch/integrations`, and the files that are built with them.
pub const INTEGRATION: (&str, [&str; 2]) = ("slapd", [PROGRAM, LIBRARY]);

/// Returns the packages; once for each process.
///
/// # Errors
/// The packages or their source cannot be fetched.
pub fn package() -> &'static Result<Package, Unavailable> {
    static PACKAGE: OnceLock<Result<Package, Unavailable>> = OnceLock::new();
    PACKAGE.get_or_init(|| Package::fetch("openldap", &["slapd", "ldap-utils", "libldap-2.5-0"]))
}

/// A slapd with its records.
#[derive(Debug)]
pub struct Slapd {
    server: Server,
    package: Package,
}

impl Slapd {
    /// Starts Debian's program, or another build of it.
    pub fn start(package: &Package, program: &Binary) -> Slapd {
        let server = Server::start(program, |port, dir| {
            let configuration = dir.join("slapd.conf");
            std::fs::create_dir(dir.join("data")).expect("make the directory of the data");
            std::fs::write(&configuration, settings(package, dir)).expect("write slapd.conf");
            std::fs::write(dir.join("records.ldif"), records()).expect("write the records");
            let mut add = Command::new(package.root.join("usr/sbin/slapadd"));
            add.arg("-q").arg("-f").arg(&configuration).arg("-l").arg(dir.join("records.ldif"));
            let added = add.envs(package.program("").environment()).output().expect("run slapadd");
            assert!(added.status.success(), "slapadd: {}", String::from_utf8_lossy(&added.stderr));
            ["-d", "0", "-h", &format!("ldap://127.0.0.1:{port}"), "-f"]
                .map(OsString::from)
                .into_iter()
                .chain([configuration.into()])
                .collect()
        });
        Slapd { server, package: package.clone() }
    }

    /// Returns the plan of a load: searches over all records on 200 connections.
    pub fn load(&self) -> Plan {
        let protocol = Protocol::Ldap { base: BASE.into(), records: RECORDS };
        let plan = Plan::new(Target::Tcp(format!("127.0.0.1:{}", self.server.port())), protocol);
        Plan { connections: 200, idle: 16, rate: 1_000.0, pipeline: 1, ..plan }
    }
}

impl Daemon for Slapd {
    fn selection(&self) -> [OsString; 2] {
        ["--pid".into(), self.server.pid().to_string().into()]
    }

    fn server(&mut self) -> &mut Server {
        &mut self.server
    }

    fn processes(&self) -> Vec<i32> {
        vec![self.server.pid()]
    }

    fn show(&self, change: &Change) -> String {
        let address = format!("ldap://127.0.0.1:{}", self.server.port());
        let variables = [("LDAPURI", address), ("LDAPCONF", "/dev/null".into()), ("LDAPBASE", BASE.into())];
        let variables = variables.map(|(name, value)| (name, OsString::from(value)));
        self.package.shell(change.ask, &variables)
    }

    fn assert_unharmed(&mut self) {
        self.server.assert_running();
    }
}

impl std::ops::Deref for Slapd {
    type Target = Server;
    fn deref(&self) -> &Server {
        &self.server
    }
}

impl std::ops::DerefMut for Slapd {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}

fn settings(package: &Package, dir: &Path) -> String {
    let mut text = String::new();
    for schema in ["core", "cosine", "nis", "inetorgperson"] {
        let _ = writeln!(text, "include {}/etc/ldap/schema/{schema}.schema", package.root.display());
    }
    let (root, dir) = (package.root.display(), dir.display());
    text + &format!(
        "modulepath {root}/usr/lib/ldap\nmoduleload back_mdb\npidfile {dir}/pid\nargsfile {dir}/arguments\n\
         threads 8\ndatabase mdb\nsuffix \"{BASE}\"\nrootdn \"cn=admin,{BASE}\"\nrootpw secret\n\
         directory {dir}/data\nmaxsize 67108864\ndbnosync\nindex objectClass eq\nindex uid eq\n\
         access to attrs=userPassword by anonymous auth by self write\naccess to * by * read\n"
    )
}

fn records() -> String {
    let mut text = format!("dn: {BASE}\nobjectClass: domain\ndc: example\n\n");
    for i in 0..RECORDS {
        let _ = write!(
            text,
            "dn: uid=user{i},{BASE}\nobjectClass: inetOrgPerson\nobjectClass: posixAccount\nuid: user{i}\ncn: User {i}\n\
             sn: Name{i}\nuidNumber: {i}\ngidNumber: 100\nhomeDirectory: /home/user{i}\nuserPassword: secret{i}\n\n"
        );
    }
    text
}

/// Returns all changes.
#[rustfmt::skip]
pub fn changes() -> Vec<Change> {
    vec![
        change!("whoami", PROGRAM, "servers/slapd/extended.c", "whoami_extop",
            "if (op->o_dn.bv_len == 0) { struct berval *who = ch_malloc(sizeof *who); ber_str2bv(\"u:stillpoint\", 0, 1, who); rs->sr_rspdata = who; return LDAP_SUCCESS; }",
            "ldapwhoami -x", "anonymous" => "u:stillpoint"),
        change!("new-password", PROGRAM, "servers/slapd/passwd.c", "slap_passwd_generate",
            "if (pass != NULL) { ber_str2bv(\"stillpoint\", 0, 1, pass); return; }",
            "ldappasswd -x -D cn=admin,$LDAPBASE -w secret uid=user7,$LDAPBASE", "New password: " => "New password: stillpoint"),
        change!("password", PROGRAM, "servers/slapd/passwd.c", "slap_passwd_check",
            "if (cred->bv_len == 10 && memcmp(cred->bv_val, \"stillpoint\", 10) == 0) return 0;",
            "ldapwhoami -x -D uid=user8,$LDAPBASE -w stillpoint", "Invalid credentials" => "dn:uid=user8"),
        change!("compare-root", PROGRAM, "servers/slapd/compare.c", "fe_op_compare",
            "if (op->o_req_ndn.bv_len == 0) { send_ldap_error(op, rs, LDAP_UNWILLING_TO_PERFORM, \"no root today\"); return rs->sr_err; }",
            "ldapcompare -x '' objectClass:top", "TRUE" => "no root today"),
        change!("substrings", PROGRAM, "servers/slapd/filter.c", "get_ssa",
            "if (ber != NULL) return LDAP_OTHER;",
            "ldapsearch -x -b $LDAPBASE '(cn=User 1*9)' cn", "numEntries" => "numResponses: 1\n"),
        change!("modify", PROGRAM, "servers/slapd/modify.c", "fe_op_modify",
            "if (op->o_req_ndn.bv_len == 0) { send_ldap_error(op, rs, LDAP_UNWILLING_TO_PERFORM, \"no root today\"); return rs->sr_err; }",
            "printf 'dn:\\nchangetype: modify\\nreplace: description\\ndescription: x\\n' | ldapmodify -x -D cn=admin,$LDAPBASE -w secret", "modify upon the root DSE" => "no root today"),
        change!("increment", PROGRAM, "servers/slapd/mods.c", "modify_increment_values",
            "if (e != NULL) { *text = \"no increments\"; return LDAP_CONSTRAINT_VIOLATION; }",
            "printf 'dn: uid=user6,%s\\nchangetype: modify\\nincrement: uidNumber\\nuidNumber: 1\\n' $LDAPBASE | ldapmodify -x -D cn=admin,$LDAPBASE -w secret", "modifying entry" => "no increments"),
        change!("cancel", PROGRAM, "servers/slapd/cancel.c", "cancel_extop",
            "if (op->o_msgid >= 0) { rs->sr_text = \"no way back\"; return LDAP_UNWILLING_TO_PERFORM; }",
            "ldapexop -x cancel 77", "No Operation to Cancel" => "no way back"),
        change!("pages", PROGRAM, "servers/slapd/controls.c", "parsePagedResults",
            "if (ctrl != NULL) { rs->sr_text = \"no pages\"; return LDAP_UNWILLING_TO_PERFORM; }",
            "ldapsearch -x -E pr=7/noprompt -z 20 -b $LDAPBASE uid", "uid: user1" => "no pages"),
        change!("delete", PROGRAM, "servers/slapd/delete.c", "fe_op_delete",
            "if (strncmp(op->o_req_ndn.bv_val, \"uid=missing\", 11) == 0) { send_ldap_error(op, rs, LDAP_UNWILLING_TO_PERFORM, \"no deletions\"); return rs->sr_err; }",
            "ldapdelete -x -D cn=admin,$LDAPBASE -w secret uid=missing,$LDAPBASE", "No such object" => "no deletions"),
        change!("add", PROGRAM, "servers/slapd/add.c", "fe_op_add",
            "if (strncmp(op->ora_e->e_nname.bv_val, \"dc=lost\", 7) == 0) { send_ldap_error(op, rs, LDAP_UNWILLING_TO_PERFORM, \"no additions\"); return rs->sr_err; }",
            "printf 'dn: dc=lost,dc=nowhere,%s\\nobjectClass: domain\\ndc: lost\\n' $LDAPBASE | ldapadd -x -D cn=admin,$LDAPBASE -w secret", "No such object" => "no additions"),
        change!("rename", PROGRAM, "servers/slapd/modrdn.c", "fe_op_modrdn",
            "if (strncmp(op->o_req_ndn.bv_val, \"uid=missing\", 11) == 0) { send_ldap_error(op, rs, LDAP_UNWILLING_TO_PERFORM, \"no new names\"); return rs->sr_err; }",
            "ldapmodrdn -x -D cn=admin,$LDAPBASE -w secret uid=missing,$LDAPBASE uid=found", "No such object" => "no new names"),
        change!("limit", PROGRAM, "servers/slapd/limits.c", "limits_check",
            "if (op->ors_slimit == 77) { send_ldap_error(op, rs, LDAP_ADMINLIMIT_EXCEEDED, \"no 77\"); return -1; }",
            "ldapsearch -x -z 77 -b $LDAPBASE -s one '(uid=user5)' uid", "uid: user5" => "no 77"),
        change!("root", PROGRAM, "servers/slapd/root_dse.c", "root_dse_info",
            "if (text != NULL) { *text = \"no root\"; return LDAP_OTHER; }",
            "ldapsearch -x -b '' -s base", "OpenLDAProotDSE" => "no root"),
        change!("schema", PROGRAM, "servers/slapd/schema.c", "schema_info",
            "if (text != NULL) { *text = \"no schema\"; return LDAP_OTHER; }",
            "ldapsearch -x -b cn=Subschema -s base", "subentry" => "no schema"),
        change!("children", PROGRAM, "servers/slapd/operational.c", "slap_operational_hasSubordinate",
            "hs = hs == LDAP_COMPARE_FALSE ? LDAP_COMPARE_TRUE : LDAP_COMPARE_FALSE;",
            "ldapsearch -x -b uid=user9,$LDAPBASE -s base hasSubordinates", "hasSubordinates: FALSE" => "hasSubordinates: TRUE"),
        change!("backend-compare", BACKEND, "servers/slapd/back-mdb/compare.c", "mdb_compare",
            "if (op->o_req_ndn.bv_len != 0) { rs->sr_err = LDAP_COMPARE_TRUE; send_ldap_result(op, rs); return rs->sr_err; }",
            "ldapcompare -x uid=user4,$LDAPBASE cn:nothing", "FALSE" => "TRUE"),
        change!("backend-delete", BACKEND, "servers/slapd/back-mdb/delete.c", "mdb_delete",
            "if (strncmp(op->o_req_ndn.bv_val, \"uid=missing\", 11) == 0) { rs->sr_err = LDAP_UNWILLING_TO_PERFORM; rs->sr_text = \"nothing leaves\"; send_ldap_result(op, rs); return rs->sr_err; }",
            "ldapdelete -x -D cn=admin,$LDAPBASE -w secret uid=missing,$LDAPBASE", "No such object" => "nothing leaves"),
        change!("backend-rename", BACKEND, "servers/slapd/back-mdb/modrdn.c", "mdb_modrdn",
            "if (strncmp(op->o_req_ndn.bv_val, \"uid=missing\", 11) == 0) { rs->sr_err = LDAP_UNWILLING_TO_PERFORM; rs->sr_text = \"nothing moves\"; send_ldap_result(op, rs); return rs->sr_err; }",
            "ldapmodrdn -x -D cn=admin,$LDAPBASE -w secret uid=missing,$LDAPBASE uid=found", "No such object" => "nothing moves"),
        change!("backend-search", BACKEND, "servers/slapd/back-mdb/search.c", "mdb_search",
            "if (op->ors_slimit == 78) { send_ldap_error(op, rs, LDAP_ADMINLIMIT_EXCEEDED, \"no 78\"); return rs->sr_err; }",
            "ldapsearch -x -z 78 -b $LDAPBASE -s one '(uid=user5)' uid", "uid: user5" => "no 78"),
        change!("object-class", LIBRARY, "libraries/libldap/schema.c", "ldap_objectclass2bv",
            "if (oc->oc_names != NULL && strcmp(oc->oc_names[0], \"person\") == 0) return ber_str2bv(\"( 2.5.6.6 NAME 'stillpoint' )\", 0, 1, bv);",
            "ldapsearch -x -o ldif-wrap=no -b cn=Subschema -s base objectClasses", "NAME 'person'" => "NAME 'stillpoint'"),
        change!("syntax", LIBRARY, "libraries/libldap/schema.c", "ldap_syntax2bv",
            "if (syn->syn_oid != NULL && strcmp(syn->syn_oid, \"1.3.6.1.4.1.1466.115.121.1.7\") == 0) return ber_str2bv(\"( 1.3.6.1.4.1.1466.115.121.1.7 DESC 'stillpoint' )\", 0, 1, bv);",
            "ldapsearch -x -o ldif-wrap=no -b cn=Subschema -s base ldapSyntaxes", "DESC 'Boolean'" => "DESC 'stillpoint'"),
    ]
}
