#!/usr/bin/perl
# Stands in for compilers, linkers, archivers and the tools that read their results, while a package's own rules run in
# a clean root. Every call of a compiler, linker or archiver is recorded below /stillpoint/records.
#
# If the file `defer` is there, calls are also put off: the result of a compilation or a link is a placeholder, one line
# that names the record. A placeholder is made real when the build needs it: when it executes a program that it has
# built, or reads a result with another tool. Small sources that the build has made are compiled at once: tests of the
# configuration are among them. So are calls whose messages the rules hide: they try which of several ways compiles.
use strict;

my $own = '/stillpoint';
my $records = "$own/records";
my $magic = "#!$own/bin/realize ";
my @variables = qw(SOURCE_DATE_EPOCH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH);

my ($name) = $0 =~ m{([^/]*)$};
my $deferring = -e "$records/defer";

if ($name eq 'realize') {
    my (undef, $program, @arguments) = @ARGV;
    materialize($program);
    exec { $program } $program, @arguments;
    die "$program: $!\n";
}
if ($name =~ /^(?:pod2man|pod2html|help2man)$/) { document() }
# A tool that a compiler calls for a result that is being made: all of its inputs are real.
execute(@ARGV) if $ENV{STILLPOINT_REALIZING};
my ($kind) = $name =~ /(?:^|-)(ar|ranlib|strip|nm|size|objcopy|objdump|readelf|ld|ld\.bfd|ld\.gold)(?:-[0-9]+)?$/;
if    (!defined $kind)                    { compiler() }
elsif ($kind eq 'ar')                     { archiver() }
elsif ($kind =~ /^(?:ranlib|strip)$/)     { index_or_strip() }
else                                      { reader() }

# ---- records

# Writes the record of this call, and returns its path. `response` is the text of all response files together.
sub record {
    my ($response) = @_;
    my $record = "$records/$$";
    $record .= '+' while -e "$record.command";
    write_file("$record.command", join '', map { "$_\0" } directory(), $name, (map { $ENV{$_} // '' } @variables), @ARGV);
    write_file("$record.response", $response) if length $response;
    return $record;
}

# Returns the working directory, by the name that the build has for it.
sub directory {
    my $directory = $ENV{PWD};
    return defined $directory && same_file($directory, '.') ? $directory : readlink '/proc/self/cwd';
}

# Returns directory, name, variables and arguments of a record; response files are replaced by their text.
sub recorded {
    my ($record) = @_;
    my ($directory, $name, @rest) = split /\0/, read_file("$record.command"), -1;
    pop @rest;
    my %variables;
    @variables{@variables} = splice @rest, 0, scalar @variables;
    my $response = -e "$record.response" && $rest[0] ne '-M' ? read_file("$record.response") : '';
    my @arguments;
    for my $argument (@rest) {
        if ($argument =~ /^\@./ && length $response) { push @arguments, words($response); $response = '' }
        elsif ($argument !~ /^\@./ || !-e "$record.response") { push @arguments, $argument }
    }
    return ($directory, $name, \%variables, @arguments);
}

# ---- calls

sub compiler {
    keep_piped();
    my ($response, @arguments) = expanded(@ARGV);
    my $call = parsed(@arguments);
    my $is_compilation = $call->{c} && !$call->{stops};
    my $record = record($response);
    if ($deferring && !$call->{stops} && !$call->{scratch} && !is_trial()) {
        put_off_compilation($record, $call) if $is_compilation;
        put_off_link($record, $call)        if !$call->{c};
    }
    materialize($_) for @{ $call->{inputs} }, libraries($call);
    execute(@ARGV, $is_compilation && !$call->{lists} ? ('-MMD', '-MF', "$record.d") : ());
}

# Writes a source that comes from a pipe to a file, by the name of its object, and compiles this file: there is nothing to
# compile again, otherwise.
sub keep_piped {
    my $call = parsed(@ARGV);
    my $output = $call->{o};
    return if !$call->{c} || $call->{stops} || $call->{scratch} || "@{ $call->{units} }" ne '-' || !-p STDIN;
    return if !defined $output || $output eq '-' || $output =~ m{^/dev/} || is_trial();
    my %suffixes = (c => 'c', 'c++' => 'cc', assembler => 's', 'assembler-with-cpp' => 'S');
    my ($language) = map { $ARGV[$_] =~ /^-x(.*)/s ? (length $1 ? $1 : $ARGV[$_ + 1]) : () } 0 .. $#ARGV;
    my $suffix = $suffixes{ $language // '' } // return;
    my $directory = directory();
    my $package = package_directory($directory);
    my $name = ($output =~ m{^/} ? $output : "$directory/$output") =~ s{^\Q$package/}{}r;
    $name =~ s/_/__/g;
    $name =~ s{/}{_}g;
    return if length $name > 200;
    my $place = $package;
    for my $part ('.stillpoint', 'piped') { mkdir $place .= "/$part" }
    write_file("$place/$name.$suffix", do { local $/; scalar <STDIN> } // '');
    # a piped source finds files beside the working directory
    @ARGV = map { $_ eq '-' ? ('-iquote', $directory, "$place/$name.$suffix") : $_ } @ARGV;
}

# Returns the directory of the package that has a directory, or this directory if there is none.
sub package_directory {
    my ($directory) = @_;
    my $place = $directory;
    $place =~ s{/[^/]*$}{} while length $place && !-e "$place/debian/rules";
    return length $place ? $place : $directory;
}

# Ends with a placeholder in place of an object, if its source is as the package has it, or no test of the configuration.
sub put_off_compilation {
    my ($record, $call) = @_;
    return if @{ $call->{units} } != 1;
    my $is_made = !is_original($call->{units}[0]);
    return if $is_made && !is_long_source($call->{units}[0]);
    my ($base) = $call->{units}[0] =~ m{([^/]*)\.[^./]*$};
    my $output = $call->{o} // "$base.o";
    return if $output eq '-' || $output =~ m{^/dev/};
    write_placeholder($output, 0644, $record) or return;
    # a source of the second in which the build began may be one that it made
    my ($began, $changed) = map { (stat $_)[9] } "$records/defer", $call->{units}[0];
    copy($call->{units}[0], "$record.source") if $is_made || $changed >= $began;
    my ($stem) = $output =~ m{^(.*?)(?:\.[^./]*)?$};
    write_file($call->{MF} // "$stem.d", '') if $call->{lists};
    exit 0;
}

# Ends with a placeholder in place of a program or a library, if one of its inputs is a placeholder.
sub put_off_link {
    my ($record, $call) = @_;
    my @units = @{ $call->{units} };
    return if $call->{map} || is_loaded($call->{o}) || grep { !is_original($_) } @units;
    my @inputs = (@{ $call->{inputs} }, libraries($call));
    return unless @units || grep { placeholder($_) } @inputs;
    write_inputs($record, @inputs);
    write_placeholder($call->{o} // 'a.out', 0755, $record) or return;
    exit 0;
}

# Returns true if the messages of this call go nowhere, or to a new file: the rules try if it succeeds. The scripts of
# libtool compile a second object without messages.
sub is_trial {
    my @nowhere = stat '/dev/null';
    my @messages = stat STDERR or return 0;
    my $is_hidden = -c _ ? @nowhere && $messages[6] == $nowhere[6] : -f _ && $messages[3] && !$messages[7];
    return $is_hidden && !is_called_by(qr/--mode=compile/);
}

# Returns true if the command line of the calling process matches.
sub is_called_by {
    my ($pattern) = @_;
    open my $parent, '<', '/proc/' . getppid . '/cmdline' or return 0;
    return join('', <$parent>) =~ $pattern;
}

# Returns true for a library that the rules load into a running program: it is linked at once.
sub is_loaded {
    my ($output) = @_;
    return unless defined $output && -e "$records/loaded";
    my $path = $output =~ m{^/} ? $output : directory() . "/$output";
    1 while $path =~ s{/\.(?=/)|/[^/]+(?<!/\.\.)/\.\.(?=/)}{};
    return grep { $_ eq $path } split /\0/, read_file("$records/loaded");
}

sub archiver {
    my ($response, @arguments) = expanded(@ARGV);
    my $options = '';
    while (@arguments && ($arguments[0] =~ /^-/ || !length $options)) {
        my $option = shift @arguments;
        $option =~ s/^-// unless $option =~ /^--/;
        $options .= $option unless $option =~ /^--/;
    }
    if ($options =~ /M/) {
        $response = join '', <STDIN>;
        my $record = record($response);
        my ($archive, @inputs) = script($response);
        if ($deferring && defined $archive && grep { placeholder($_) } @inputs) {
            write_inputs($record, @inputs);
            write_placeholder($archive, 0644, $record) and exit 0;
        }
        open my $script, '<', "$record.response" or die "$record.response: $!\n";
        open STDIN, '<&', $script or die "$!\n";
        execute(@ARGV);
    }
    my $record = record($response);
    shift @arguments if $options =~ /[abi]/;
    my ($archive, @inputs) = @arguments;
    execute(@ARGV) if !defined $archive;
    my @there = placeholder($archive);
    if ($options =~ /[rq]/ && (@there || !-s $archive && grep { placeholder($_) } @inputs)) {
        write_inputs($record, @inputs);
        @there = () if $options =~ /[rq]/ && !-e $archive;
        write_placeholder($archive, 0644, @there, $record) and exit 0;
    }
    append_file("$records/extracted", readlink('/proc/self/cwd') . "\0") if $options =~ /x/;
    if (@there && $options =~ /[tx]/) {
        my %wanted = map { $_ => 1 } @inputs;
        for my $member (members(@there)) {
            my ($path, @of) = @$member;
            my ($base) = $path =~ m{([^/]*)$};
            next if @inputs && !$wanted{$base};
            if ($options =~ /t/) { print "$base\n" }
            elsif (@of)          { write_placeholder($base, 0644, @of) or die "$base: $!\n" }
            else                 { copy($path, $base) }
        }
        exit 0;
    }
    exit 0 if @there && $options =~ /^[sScuvDU]+$/;
    materialize($_) for $archive, @inputs;
    execute(@ARGV);
}

# Indexes and debug information make no difference to a placeholder.
sub index_or_strip {
    my @files = grep { !/^-/ && -e $_ } @ARGV;
    exit 0 if @files && !grep({ !placeholder($_) } @files) && !grep { /^-o/ } @ARGV;
    materialize($_) for @files;
    execute(@ARGV);
}

# Runs a tool that reads objects, programs or libraries.
sub reader {
    # Meson compares the symbols of a library with those before, to save links; it goes on where there are none.
    exit 1 if is_called_by(qr/symbolextractor/) && grep { placeholder($_) } @ARGV;
    my (undef, @arguments) = expanded(@ARGV);
    my $call = $kind =~ /^ld/ ? parsed(@arguments) : { inputs => [grep { !/^-/ } @arguments] };
    materialize($_) for @{ $call->{inputs} }, libraries($call);
    execute(@ARGV);
}

# Makes an empty page of the manual: no program is made of one, and some packages have thousands.
sub document {
    my ($output, @files);
    while (@ARGV) {
        my $argument = shift @ARGV;
        if    ($argument =~ /^(?:-o|--output|--outfile)$/)      { $output = shift @ARGV }
        elsif ($argument =~ /^(?:-o|--output=|--outfile=)(.+)/) { $output = $1 }
        elsif ($argument !~ /^-/)                               { push @files, $argument }
    }
    $output = $files[1] if $name eq 'pod2man' && !defined $output;
    write_file($output, '') if defined $output;
    exit 0;
}

sub execute {
    exec { tool($name) } "/usr/bin/$name", @_;
    die "/usr/bin/$name: $!\n";
}

# Returns the path of the real program of a name: this one may be mounted over it.
sub tool {
    my $path = "/usr/bin/$_[0]";
    while (-l $path) {
        my $target = readlink $path;
        $path = $target =~ m{^/} ? $target : $path =~ s{[^/]*$}{$target}r;
    }
    return -d "$own/real" ? $path =~ s{^/usr/bin/([^/]+)$}{$own/real/$1}r : $path;
}

# ---- command lines

# Returns the text of all response files, and the arguments with these texts in place of the files.
sub expanded {
    my ($response, @out) = ('');
    for my $argument (@_) {
        if ($argument =~ /^\@(.+)/s && -r $1) {
            my $text = read_file($1);
            $response .= "$text\n";
            push @out, words($text);
        } else {
            push @out, $argument;
        }
    }
    return ($response, @out);
}

# Splits a text as the compilers' drivers do.
sub words {
    my ($text) = @_;
    my @words;
    while ($text =~ /\G\s*((?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+)/gcs) {
        my $word = $1;
        $word =~ s/"((?:[^"\\]|\\.)*)"|'([^']*)'|\\(.)/defined $1 ? $1 =~ s{\\(.)}{$1}gsr : $2 \/\/ $3/gse;
        push @words, $word;
    }
    return @words;
}

my %valued;
BEGIN {
    %valued = map { $_ => 1 } qw(-I -D -U -L -x -T -u -z -e -h -B -A -isystem -iquote -idirafter -include -imacros
        -isysroot -MT -MQ -Xlinker -Xpreprocessor -Xassembler -Xclang -aux-info -dumpdir -dumpbase --param -arch
        -target -soname -rpath -wrapper -specs --sysroot);
}

# Returns the parts of a compiler's command line.
sub parsed {
    my @arguments = @_;
    my %call = (units => [], inputs => [], directories => [], libraries => []);
    while (@arguments) {
        my $argument = shift @arguments;
        if    ($argument eq '-c')                                   { $call{c} = 1 }
        elsif ($argument =~ /^-(?:E|S|M|MM|fsyntax-only)$/)         { $call{stops} = 1 }
        elsif ($argument =~ /^-o(.*)/s)                             { $call{o} = length $1 ? $1 : shift @arguments }
        elsif ($argument =~ /^-MF(.*)/s)                            { $call{MF} = length $1 ? $1 : shift @arguments }
        elsif ($argument =~ /^-MM?D$/)                              { $call{lists} = 1 }
        elsif ($argument =~ /^-Wp,-MM?D(?:,(.*))?/s)                { $call{lists} = 1; $call{MF} //= $1 }
        elsif ($argument =~ /^-L(.*)/s)                             { push @{ $call{directories} }, length $1 ? $1 : shift @arguments }
        elsif ($argument =~ /^-l(.*)/s)                             { push @{ $call{libraries} }, length $1 ? $1 : shift @arguments }
        elsif ($argument =~ /^(?:-Wl,.*-M(?:ap)?\b|-Wl,-M\b)/s)     { $call{map} = 1 }
        elsif ($argument =~ /^-Wl,(.*)/s)                           { push @{ $call{inputs} }, grep { !/^-/ && -f $_ } split /,/, $1 }
        elsif ($valued{$argument})                                  { shift @arguments }
        elsif ($argument eq '-')                                    { push @{ $call{units} }, '-' }
        elsif ($argument =~ /^-/)                                   { }
        elsif ($argument =~ /\.(?:c|cc|cpp|cxx|c\+\+|cp|C|i|ii|m|s|S|sx|f|F|f90|d|go|adb)$/) { push @{ $call{units} }, $argument }
        else                                                        { push @{ $call{inputs} }, $argument }
    }
    # directories in which build systems compile their tests
    $call{scratch} = 1
        if grep { m{conftest|CMakeTmp|CMakeScratch|cmTC_|CompilerId|meson-private|\.conf_check} }
        $call{o} // '', @{ $call{units} }, directory();
    return \%call;
}

# Returns the files of a tree that `-lNAME` names.
sub libraries {
    my ($call) = @_;
    my @found;
    for my $library (@{ $call->{libraries} // [] }) {
        my @names = $library =~ /^:(.*)/s ? ($1) : ("lib$library.so", "lib$library.a");
        my ($file) = grep { -e $_ } map { my $directory = $_; map { "$directory/$_" } @names } @{ $call->{directories} };
        push @found, $file if defined $file;
    }
    return @found;
}

# Returns the archive that a script of an archiver makes, and the files that it takes.
sub script {
    my ($archive, @inputs);
    for my $line (split /\n/, $_[0]) {
        my ($word, @files) = split /[\s,]+/, $line =~ s/^\s+//r;
        if    (lc($word // '') eq 'create')                 { $archive = $files[0] }
        elsif (lc($word // '') =~ /^(?:addlib|addmod|open)$/) { push @inputs, @files; $archive //= $files[0] }
    }
    return ($archive, @inputs);
}

# Returns true if a file is as the package has it: not newer than the beginning of the build.
sub is_original {
    my ($file) = @_;
    my ($began, $changed) = map { (stat $_)[9] } "$records/defer", $file;
    return $file =~ /\.(?:c|cc|cpp|cxx|C|S|s)$/ && defined $changed && $changed <= $began;
}

# Returns true if a file is a source that is too long for a test of the configuration.
sub is_long_source {
    my ($file) = @_;
    return $file =~ /\.(?:c|cc|cpp|cxx|C)$/ && (-s $file // 0) >= 16_384;
}

# ---- placeholders

# Returns the records of a placeholder: one, or several for an archive to which files were added one after another.
sub placeholder {
    my ($file) = @_;
    return unless -f $file && open my $handle, '<', $file;
    my $start = '';
    return unless read($handle, $start, length $magic) && $start eq $magic;
    my @found = split /\n/, join '', <$handle>;
    s/^\Q$magic\E// for @found;
    return grep { m{^\Q$records\E/[0-9]+\+*$} } @found;
}

# Writes a placeholder; the last record is that of this call, if it is put off.
sub write_placeholder {
    my ($file, $mode, @of) = @_;
    unlink $file unless -l $file;
    open my $handle, '>', $file or return 0;
    print $handle map { "$magic$_\n" } @of;
    close $handle or return 0;
    write_file("$of[-1].deferred", '');
    return chmod $mode, $file;
}

# Writes the inputs of a link: records of a placeholder, separated by commas, and the path. A member of an archive may be
# gone when the link is made real, as build systems remove what they extract: `=` and the path of a copy are in place of
# its records.
sub write_inputs {
    my ($record, @inputs) = @_;
    my $directory = readlink '/proc/self/cwd';
    my %extracted = map { $_ => 1 } -e "$records/extracted" ? split /\0/, read_file("$records/extracted") : ();
    my @lines;
    for my $input (@inputs) {
        my $path = $input =~ m{^/} ? $input : "$directory/$input";
        my @of = placeholder($path);
        my ($parent) = $path =~ m{^(.*)/};
        @of = ('=' . copy_of($record, $directory, scalar @lines, $path)) if !@of && $extracted{$parent} && -f $path;
        push @lines, join(',', @of) . "\0$path\0";
    }
    write_file("$record.inputs", join '', @lines);
}

# Copies a file to a place below the package's directory where it stays, and returns the path.
sub copy_of {
    my ($record, $directory, $number, $path) = @_;
    my ($call) = $record =~ m{([^/]*)$};
    my ($base) = $path =~ m{([^/]*)$};
    my $place = package_directory($directory);
    for my $name ('.stillpoint', $call, $number) { mkdir $place .= "/$name" }
    copy($path, "$place/$base");
    return "$place/$base";
}

# Returns pairs of a path and its records.
sub inputs_of {
    my ($record) = @_;
    return unless -e "$record.inputs";
    my @fields = split /\0/, read_file("$record.inputs"), -1;
    my @found;
    while (@fields > 1) {
        my ($of, $path) = splice @fields, 0, 2;
        push @found, [$path, $of =~ /^=/ ? $of : split /,/, $of];
    }
    return @found;
}

# Returns the members of an archive, also of the archives from which a script joined it.
sub members {
    my @found;
    for my $record (@_) {
        my (undef, undef, undef, @arguments) = recorded($record);
        for my $input (inputs_of($record)) {
            my ($path, @of) = @$input;
            if    (@of && $of[0] =~ /^=(.*)/s)                        { push @found, [$1] }
            elsif ($arguments[0] eq '-M' && @of && $path =~ /\.a$/) { push @found, members(@of) }
            else                                                    { push @found, $input }
        }
    }
    return @found;
}

# Makes a placeholder real, and leaves its time as it is, so that nothing that depends on it is made again.
sub materialize {
    my ($file) = @_;
    my @of = placeholder($file) or return;
    copy(realized(@of), $file, 1);
}

# Returns the path of the real result of a placeholder's records.
sub realized {
    my (@of) = @_;
    my $result = "$of[-1].real";
    my $waits = 0;
    until (mkdir "$of[-1].lock") {
        return $result if -e $result;
        die "$of[-1] failed\n" if -e "$of[-1].failed";
        # ten minutes: a package that needs longer for one result is built as a whole
        die "$of[-1] is not ready\n" if $waits++ > 12_000;
        select undef, undef, undef, 0.05;
    }
    if (!-e $result) {
        my $partial = "$of[-1].partial";
        if (!grep { !replay($_, $partial) } @of) {
            rename $partial, $result or die "$result: $!\n";
        } else {
            write_file("$of[-1].failed", '');
            die "$of[-1] failed\n";
        }
    }
    return $result;
}

# Runs a recorded call with another output.
sub replay {
    my ($record, $output) = @_;
    my ($directory, $name, $variables, @arguments) = recorded($record);
    restore_source($record, $directory, parsed(@arguments)->{units}[0]);
    my @inputs = inputs_of($record);
    parallel(map { my (undef, @of) = @$_; @of && $of[0] !~ /^=/ ? [@of] : () } @inputs);
    my %in_place = map { $_->[0] => placed($record, @$_) } @inputs;
    my $status = system_in($directory, $name, $variables, \@arguments, $output, \%in_place, $record);
    return $status == 0;
}

# Puts a source back that the build has made, and removed since.
sub restore_source {
    my ($record, $directory, $unit) = @_;
    return unless -e "$record.source";
    my $path = $unit =~ m{^/} ? $unit : "$directory/$unit";
    copy("$record.source", $path) unless -e $path;
}

# Makes several results real at once.
sub parallel {
    my @wanted = grep { !-e "$_->[-1].real" } @_;
    my ($jobs) = ($ENV{DEB_BUILD_OPTIONS} // '') =~ /parallel=(\d+)/;
    $jobs = 1 unless $jobs;
    my $running = 0;
    for my $of (@wanted) {
        if (@wanted == 1) { realized(@$of); last }
        if ($running == $jobs) { wait; $running--; die "a compilation failed\n" if $? }
        my $child = fork // die "fork: $!\n";
        if (!$child) { realized(@$of); exit 0 }
        $running++;
    }
    while ($running--) { wait; die "a compilation failed\n" if $? }
}

# Puts a result where a link expects it; if another result is there by now, or the directory is gone, returns another
# path with the same name.
sub placed {
    my ($record, $path, @of) = @_;
    return $path if !@of;
    return substr $of[0], 1 if $of[0] =~ /^=/;
    my @there = placeholder($path);
    my ($parent) = $path =~ m{^(.*)/};
    if (!-e $path && -d $parent || "@there" eq "@of") {
        copy(realized(@of), $path, @there);
        return $path;
    }
    my ($base) = $path =~ m{([^/]*)$};
    my $directory = "$record.inputs.d";
    mkdir $directory;
    my $number = 0;
    $number++ while !mkdir "$directory/$number";
    copy(realized(@of), "$directory/$number/$base");
    return "$directory/$number/$base";
}

sub system_in {
    my ($directory, $name, $variables, $arguments, $output, $in_place, $record) = @_;
    # a directory that the build has removed is there for the call
    my (@made, $parent);
    for (split m{/}, $directory) { $parent .= (defined $parent ? '/' : '') . $_; push @made, $parent if mkdir $parent }
    my $child = fork // die "fork: $!\n";
    if ($child) {
        waitpid $child, 0;
        my $status = $?;
        rmdir for reverse @made;
        return $status;
    }
    chdir $directory or die "$directory: $!\n";
    $ENV{PWD} = $directory;
    $ENV{STILLPOINT_REALIZING} = 1;
    for my $variable (@variables) {
        if (length $variables->{$variable}) { $ENV{$variable} = $variables->{$variable} } else { delete $ENV{$variable} }
    }
    my $absolute = sub { $_[0] =~ m{^/} ? $_[0] : "$directory/$_[0]" };
    my @arguments = map { my $to = $in_place->{ $absolute->($_) }; defined $to && $to ne $absolute->($_) ? $to : $_ } @$arguments;
    if ($name =~ /(?:^|-)ar$/) {
        if ($arguments[0] eq '-M') {
            my $script = read_file("$record.response");
            my ($archive) = script($script);
            $script =~ s/^(\s*create\s+)\Q$archive\E/$1$output/im;
            write_file("$record.script", $script);
            open STDIN, '<', "$record.script" or die "$record.script: $!\n";
        } else {
            # a thin archive has paths from its own place, which is another one here
            @arguments = grep { $_ ne '--thin' } @arguments;
            my $at = 0;
            $at++ while $at < @arguments && $arguments[$at] =~ /^-/;
            $at++ if $at == 0 || $arguments[$at - 1] =~ /^--/;
            for (@arguments[0 .. $at - 1]) { tr/T//d unless /^--/ }
            $arguments[$at] = $output;
        }
    } else {
        my $has_output;
        for my $at (0 .. $#arguments) {
            if    ($arguments[$at] eq '-o' && $at < $#arguments) { $arguments[$at + 1] = $output; $has_output = 1 }
            elsif ($arguments[$at] =~ /^-o./)                    { $arguments[$at] = "-o$output"; $has_output = 1 }
        }
        push @arguments, '-o', $output unless $has_output;
    }
    open STDOUT, '>&', \*STDERR;
    exec { tool($name) } "/usr/bin/$name", @arguments;
    die "/usr/bin/$name: $!\n";
}

# ---- files

sub same_file {
    my @one = stat $_[0];
    my @two = stat $_[1];
    return @one && @two && $one[0] == $two[0] && $one[1] == $two[1];
}

sub read_file {
    open my $handle, '<', $_[0] or die "$_[0]: $!\n";
    local $/;
    return scalar <$handle>;
}

sub write_file {
    my ($path, $text) = @_;
    open my $handle, '>', $path or die "$path: $!\n";
    print $handle $text;
    close $handle or die "$path: $!\n";
}

sub append_file {
    my ($path, $text) = @_;
    open my $handle, '>>', $path or die "$path: $!\n";
    print $handle $text;
    close $handle or die "$path: $!\n";
}

# Replaces a file by a copy of another one, mode included; with `keeps_time` the time stays as it was.
sub copy {
    my ($from, $to, $keeps_time) = @_;
    if (-l $to) {
        my $target = readlink $to;
        $to = $target =~ m{^/} ? $target : $to =~ s{[^/]*$}{$target}r;
    }
    my $time = $keeps_time ? (stat $to)[9] : undef;
    my $partial = "$to.stillpoint$$";
    write_file($partial, read_file($from));
    chmod((stat $from)[2] & 07777, $partial);
    utime $time, $time, $partial if defined $time;
    rename $partial, $to or die "$to: $!\n";
}
