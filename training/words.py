"""The word lists of the generators."""

FIRST = """Anna Bruno Carla Daniel Elena Farid Greta Hugo Ines Jonas Katja Leon Maria Nadia Oscar Paula Quentin Rosa
Samir Tilda Ulrich Vera Walter Xenia Yusuf Zora Amir Bianca Cyril Dora Emil Fatima Georg Hanna Igor Julia Karim Lena
Marco Nina Olaf Petra Rafael Sonja Tomas Ursula Viktor Wanda Yara Zeno Alice Boris Clara David Edith Felix Gina Henry
Irene Jakob Kiran Laura Mikel Noemi Otto Priya Ruben Selma Timo Una""".split()

LAST = """Adler Becker Costa Duarte Engel Fischer Garcia Hansen Ivanov Jansen Keller Lopez Moreau Novak Okafor Petrov
Quist Rossi Silva Tanaka Usman Vogel Weber Xu Yilmaz Zeman Albers Brandt Conti Dietz Eriksen Ferrari Gruber Haas Ibrahim
Jung Klein Lange Meyer Nagy Olsen Pereira Richter Santos Thomsen Unger Varga Winter Young Zhang Arnold Bauer Cohen Dahl
Ekström Fuchs Graf Horvat Ito Kaya Lindt Marin Nowak Ortega Peeters Roth Sato Torres Vidal Wolf""".split()

MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday".split()

SERVICE_A = """billing search login payment catalog upload report mail chat order stock image video invoice profile
booking export import metrics session""".split()
SERVICE_B = "api index service worker gateway queue cache database portal proxy scheduler store".split()

CAUSES = """a full disk|an expired certificate|a wrong firewall rule|a memory leak|a failed deployment|a broken network switch
|a power failure|a slow database query|a missing index|a corrupt configuration file|a DNS error|a crashed backup job
|an overloaded load balancer|a bad kernel update|a deadlock in the database|a race condition|a faulty memory module
|a lost password|an unplugged cable|a typo in a script|too many open connections|a clock that ran late
|a full log partition|an outdated library|a burst of traffic""".replace("\n", "").split("|")

FIXES = """restarting the service|rolling back the release|renewing the certificate|clearing the disk|adding more memory
|replacing the switch|restoring a backup|correcting the configuration|blocking the traffic|killing the query
|moving the load to a second node|raising the connection limit|rebuilding the index|resetting the password
|installing a patch|replacing the cable|rewriting the script|deleting old logs|disabling the backup job
|rebooting the host""".replace("\n", "").split("|")

COMPANY_A = """Nordwind Alpen Hafen Blue Silver Atlas Delta Orion Vector Summit Harbor Maple Cedar Falcon Granite Lumen
Meridian Nova Polar Quartz Raven Solar Terra Vega Willow Zenith Amber Cobalt Ember Fjord""".split()
COMPANY_B = "Foods Logistics Bank Media Energy Textiles Travel Insurance Motors Systems Health Trading Labs Steel Books".split()

PRODUCTS = """the mobile app|the web shop|the printer|the invoice tool|the calendar|the mail client|the time tracker|the scanner
|the payment terminal|the label printer|the chat window|the customer portal|the backup tool|the video player
|the map view|the report editor|the login page|the file server|the phone system|the badge reader""".replace("\n", "").split("|")
PROBLEMS = """crashes at startup|shows wrong totals|prints empty pages|loses the connection|rejects valid passwords|is very slow
|sends every message twice|forgets the settings|freezes after an update|shows dates in the wrong format|does not open files
|deletes old entries|cannot find the server|ignores the language setting|makes a loud noise|shows a blank screen
|charges the wrong amount|does not save changes|logs users out|rejects large files""".replace("\n", "").split("|")
PROMISES = """send a new device|install an update|call the customer|refund the last invoice|visit the office|reset the account
|replace the cable|check the logs|restore the data|extend the license|open a remote session|write a manual
|change the settings|order a spare part|inform the supplier""".replace("\n", "").split("|")

PROJECTS = """Lantern Kettle Osprey Marble Compass Thicket Bramble Pebble Anchor Beacon Cinder Drift Fathom Glacier Hollow
Juniper Kestrel Loom Mosaic Nimbus Onyx Paddle Quill Ripple Sparrow Tundra Umbra Vortex Whisker Yonder""".split()
FEATURES = """dark mode|export to CSV|two-factor login|full text search|a plugin system|keyboard shortcuts|offline mode
|automatic backups|a command line client|support for IPv6|a new file format|live previews|spell checking|touch gestures
|audit logs|batch renaming|color themes|a status page|image resizing|encrypted storage|voice input|a REST interface
|printing to PDF|shared folders|undo history""".replace("\n", "").split("|")
BUGS = """a crash on empty input|a memory leak in the parser|wrong sorting of names|a hang at shutdown|broken links in the manual
|lost messages after a timeout|a typo in the menu|duplicate entries in the list|a race in the scheduler
|wrong time zones in reports|a missing close button|slow startup on old disks|garbled text in exports
|a failed upgrade from older versions|high load when idle|an error with long file names|flickering windows
|a wrong page count|ignored settings|a security hole in uploads""".replace("\n", "").split("|")

TEAMS = """design sales support finance legal platform security research marketing hardware logistics training quality
network data release travel housing events editorial""".split()
DECISIONS = """move to a new office|hire two engineers|buy a new server|change the supplier|drop the old website|start a pilot
|translate the manual|raise the prices|open a branch in Lyon|close the help desk on Sundays|rent a larger hall
|rewrite the training plan|replace the old printers|launch a newsletter|test a second vendor|build a prototype
|renew the insurance|repeat the survey|reduce the travel budget|archive the old files|print a catalogue|plan a trade fair
|repair the roof|extend the warranty""".replace("\n", "").split("|")

TABLES = """orders customers products employees books movies cities players students cars flights rooms songs recipes
invoices tickets devices plants games schools hotels trains shops parcels""".split()
TEXT = {
    "city": "Paris Berlin Rome Madrid Oslo Vienna Lisbon Prague".split(),
    "country": "France Germany Italy Spain Norway Austria Portugal Poland".split(),
    "status": "open closed pending paid late active blocked draft".split(),
    "color": "red blue green black white yellow brown gray".split(),
    "category": "food toys tools music sport garden office health".split(),
    "team": "north south east west alpha beta gamma delta".split(),
    "brand": "Acme Orbit Zenit Nordic Kappa Lumo Vento Prima".split(),
    "owner": "Anna Bruno Clara David Elena Felix Greta Hugo".split(),
    "grade": "A B C D E F".split(),
    "language": "English French German Italian Spanish Polish Dutch Danish".split(),
    "type": "small large basic premium standard mini classic special".split(),
    "material": "wood steel glass paper cotton stone plastic leather".split(),
}
NUMBER = "price total age year stock score weight height salary rating length amount".split()

NAME_A = "calc get find make do run my new the compute solve process".split()
NAME_B = "total list values items result data numbers answer score output series block step part entry sample".split()
