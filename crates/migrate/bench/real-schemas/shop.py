"""A shop (django-oscar) with a content management system (Wagtail): customers fill baskets and order, editors publish pages."""

import os
import random
import sys
from decimal import Decimal

from testbed import run
from trial import Schema


class Shop(Schema):
    name, title = "shop", "Shop with a CMS: django-oscar and Wagtail"
    source = "PyPI"
    check_words = run_words = ["--roles", "create"]
    # An order is one transaction of hundreds of statements, with Python's work between them.
    think_s = 0.1

    def manage(self, stage, *words):
        environment = {**os.environ, "SHOP_PORT": str(stage.old.port), "SHOP_USER": "shop", "DJANGO_SETTINGS_MODULE": "shop_settings",
                       "PYTHONPATH": os.path.dirname(__file__)}
        run([sys.executable, "-m", "django", *words], env=environment)

    def prepare(self, stage):
        # The role that owns the database of an application is no superuser.
        stage.old.sql(f"CREATE ROLE shop LOGIN PASSWORD 'secret'; CREATE DATABASE {stage.database} OWNER shop; "
                      "ALTER ROLE shop SET default_transaction_isolation = 'read committed'; ALTER ROLE shop SET timezone = 'UTC'")
        stage.old.sql("CREATE EXTENSION pg_trgm; CREATE EXTENSION unaccent; CREATE EXTENSION citext", stage.database)
        self.manage(stage, "migrate", "--verbosity=0", "--skip-checks")

    def clients(self, stage):
        os.environ.update(SHOP_PORT=str(stage.port), SHOP_USER="shop", DJANGO_SETTINGS_MODULE="shop_settings")
        import django
        django.setup()
        from django.contrib.auth import get_user_model
        from django.db import transaction
        from django.db.models import Count, Sum
        from oscar.core.loading import get_class, get_model
        from wagtail.models import Page
        product_class, product, category, attribute = (get_model("catalogue", name) for name in ["ProductClass", "Product", "Category", "ProductAttribute"])
        partner, record = get_model("partner", "Partner"), get_model("partner", "StockRecord")
        basket, order, country = get_model("basket", "Basket"), get_model("order", "Order"), get_model("address", "Country")
        address, line, review = get_model("order", "ShippingAddress"), get_model("order", "Line"), get_model("reviews", "ProductReview")
        numbers, creator, strategy = get_class("order.utils", "OrderNumberGenerator"), get_class("order.utils", "OrderCreator"), get_class("partner.strategy", "Default")
        calculator, free = get_class("checkout.calculators", "OrderTotalCalculator"), get_class("shipping.methods", "Free")
        with transaction.atomic():
            books = product_class.objects.create(name="Books")
            attribute.objects.create(product_class=books, name="pages", code="pages", type="integer")
            root = category.add_root(name="All")
            house, land = partner.objects.create(name="house"), country.objects.create(iso_3166_1_a2="DE", printable_name="Germany", name="Germany")
            shelves = [root.add_child(name=f"shelf {n}") for n in range(10)]
            for n in range(300):
                one = product.objects.create(product_class=books, title=f"Book {n} über", upc=f"upc{n}")
                one.attr.pages = n
                one.attr.save()
                one.categories.add(shelves[n % 10])
                record.objects.create(product=one, partner=house, partner_sku=f"sku{n}", price=Decimal("9.99") + n, num_in_stock=100000)
            users = [get_user_model().objects.create_user(f"u{n}", f"u{n}@example.org", "x") for n in range(50)]
        identifiers = list(product.objects.values_list("id", flat=True))
        home = Page.objects.filter(depth=2).first()

        def client(seed):
            rng = random.Random(seed)

            def buy():
                user = rng.choice(users)
                with transaction.atomic():
                    filled = basket.objects.create(owner=user)
                    filled.strategy = strategy()
                    for n in rng.sample(identifiers, 3):
                        filled.add_product(product.objects.get(id=n), quantity=2)
                    to = address.objects.create(first_name="A", last_name="B", line1="Street 1", line4="Town", postcode="10115", country=land)
                    method = free()
                    cost = method.calculate(filled)
                    creator().place_order(basket=filled, total=calculator().calculate(filled, cost), shipping_method=method, shipping_charge=cost,
                                          user=user, shipping_address=to, order_number=f"{seed}-{rng.getrandbits(60)}", status="new")
                    filled.submit()

            def read():
                list(product.objects.filter(title__icontains=str(rng.randrange(300))).prefetch_related("categories", "stockrecords")[:20])
                list(order.objects.values("status").annotate(n=Count("id"), all=Sum("total_incl_tax")))

            def publish():
                page = home.add_child(instance=Page(title=f"page {rng.getrandbits(40)}", slug=f"p{rng.getrandbits(60)}")) if rng.randrange(2) else \
                    Page.objects.filter(depth=3).order_by("?").first() or home
                page.title += "!"
                page.save_revision().publish()

            def judge():
                with transaction.atomic():
                    user, one = rng.choice(users), product.objects.get(id=rng.choice(identifiers))
                    review.objects.filter(user=user, product=one).delete()
                    review.objects.create(user=user, product=one, score=rng.randrange(1, 6), title="well", body="good", status=1)
                    old = order.objects.order_by("id").first()
                    if old and rng.randrange(4) == 0:
                        old.delete()

            def move():
                with transaction.atomic():
                    category.objects.get(id=shelves[rng.randrange(10)].id).move(category.objects.get(id=root.id), "first-child")
            # Editors change one tree, so there is one of them, as with its other clients' locks.
            if seed == 0:
                return lambda: rng.choice([publish, publish, move, read])()
            return lambda: rng.choice([buy, buy, read, judge])()
        return [client(seed) for seed in range(3)]


SCHEMA = Shop
